"""The metrics page, read back by the rules of the text format."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.metrics.prometheus import render
from headrace.types.media import Route
from headrace.types.ranks import RanksStatus, RankStatus
from headrace.types.status import (
    AdapterStatus,
    CacheStatus,
    Counters,
    DiskStatus,
    DraftCounters,
    DraftStatus,
    EngineProcessStatus,
    EngineStatus,
    Histogram,
    MemoryStatus,
    ProcessStatus,
    SparseStatus,
    StepVariants,
)

FIRST_TOKEN = Histogram((0.5, 1.0), (3, 0, 2), 7.25)
OTHER = Histogram((2.5,), (1, 0), 0.125)
STATUS = EngineStatus(
    num_running=3,
    num_waiting=2,
    requests=(),
    memory=MemoryStatus(1000, 400, 300, 200, 25, 50, 15, 640, 35, capacity_tokens=1000),
    counters=Counters(
        11, 22, 5, 4, 99, (("abort", 6), ("length", 1), ("stop", 7)), DraftCounters(12, 31, (9, 4)),
        FIRST_TOKEN, Histogram((0.1,), (8, 9), 1.5), OTHER, OTHER, ((Route.TEXT, 16), (Route.MEDIA, 17)),
    ),
    cache=CacheStatus(50, 30, 4, 2, 9, 5, 700, 600),
    num_schema_violations=6,
    num_malformed_calls=8,
    drafts=DraftStatus(3, 8),
    sparse=SparseStatus("small", 2, 30, 70, (("tools", 4), ("media", 0)), 1, 13, 14, 16),
    step_forms=StepVariants(43, 2),
    engine_process=EngineProcessStatus(8.5, 99),
    ranks=RanksStatus(
        "ring", tuple(RankStatus(rank, "here", "cpu", "a CPU", 90, 60 + rank, 30 - rank) for rank in range(2)),
        101, 102, 0.5, 103, 1.5, 6.0,
    ),
)  # fmt: skip
PROCESS = ProcessStatus(uptime_s=12.5, cpu_s=3.25, peak_memory_bytes=77)

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})\{{((?:{LABEL},?)*)\}} ([-+0-9.eInf]+)")


@dataclass
class Family:
    kind: str
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)


def read(text: str) -> dict[str, Family]:
    """Metric families of a page; fails on anything that the format does not allow."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helped = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            helped = line.split(" ")[2]
            assert re.fullmatch(NAME, helped)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped
            assert name not in families, "a family stands together"
            families[name] = Family(kind)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            family = families[helped]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert match[1] in {helped + suffix for suffix in suffixes}
            labels = dict(each.split("=", 1) for each in re.findall(LABEL, match[2]))
            family.samples.append((match[1], {name: text[1:-1] for name, text in labels.items()}, float(match[3])))
    return families


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    (found,) = [
        number
        for sample, given, number in families[name].samples
        if sample == name and all(given[each] == text for each, text in labels.items())
    ]
    return found


def test_every_line_follows_the_format_and_counters_end_in_total() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    assert {family.kind for family in families.values()} == {"gauge", "counter", "histogram"}
    for name, family in families.items():
        assert (family.kind == "counter") == name.endswith("_total")
        assert name.startswith(("vllm:", "headrace:"))
        assert all(labels["model_name"] == "m" and labels["engine"] == "0" for _, labels, _ in family.samples)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.3),
        ("vllm:prompt_tokens_total", 11),
        ("vllm:generation_tokens_total", 22),
        ("vllm:num_preemptions_total", 4),
        ("headrace:steps_total", 99),
        ("headrace:step_forms_total", 43),
        ("headrace:step_forms_since_ready_total", 2),
        ("headrace:schema_misfits_total", 6),
        ("headrace:broken_tool_calls_total", 8),
        ("headrace:memory_budget_bytes", 1000),
        ("headrace:memory_weights_bytes", 400),
        ("headrace:memory_reserved_bytes", 300),
        ("headrace:memory_state_bytes", 200),
        ("headrace:memory_preempted_bytes", 25),
        ("headrace:memory_records_bytes", 50),
        ("headrace:memory_disk_bytes", 15),
        ("headrace:memory_device_bytes", 640),
        ("headrace:memory_buffers_bytes", 35),
        ("vllm:prefix_cache_queries_total", 700),
        ("vllm:prefix_cache_hits_total", 600),
        ("headrace:cache_bytes", 50),
        ("vllm:spec_decode_num_drafts_total", 12),
        ("vllm:spec_decode_num_draft_tokens_total", 31),
        ("vllm:spec_decode_num_accepted_tokens_total", 13),
        ("headrace:draft_failures_total", 8),
        ("headrace:sparse_prompts_total", 2),
        ("headrace:sparse_kept_tokens_total", 30),
        ("headrace:sparse_dropped_tokens_total", 70),
        ("headrace:sparse_scoring", 1),
        ("headrace:sparse_weights_bytes", 13),
        ("headrace:sparse_state_bytes", 14),
        ("headrace:sparse_records_bytes", 16),
        ("headrace:rank_messages_total", 101),
        ("headrace:rank_message_bytes_total", 102),
        ("headrace:rank_message_seconds_total", 0.5),
        ("headrace:rank_collectives", 103),
        ("headrace:rank_collective_seconds_total", 1.5),
        ("headrace:rank_step_seconds_total", 6),
        ("headrace:process_uptime_seconds", 12.5),
        ("headrace:process_cpu_seconds_total", 3.25),
        ("headrace:process_peak_memory_bytes", 77),
        ("headrace:engine_process_cpu_seconds_total", 8.5),
        ("headrace:engine_process_peak_memory_bytes", 99),
    ],
)
def test_each_number_stands_under_its_name(name: str, number: float) -> None:
    assert value(read(render({"m": STATUS}, PROCESS)), name) == number


def test_requests_are_told_by_their_route() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    assert [value(families, "headrace:requests_total", route=route) for route in ("text", "media")] == [16, 17]


def test_each_rank_has_its_memory() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    assert [value(families, "headrace:rank_used_bytes", rank=rank) for rank in "01"] == [60, 61]
    assert [value(families, "headrace:rank_available_bytes", rank=rank) for rank in "01"] == [30, 29]
    assert not [name for name in read(render({"m": replace(STATUS, ranks=None)}, PROCESS)) if "rank" in name]


def test_a_cache_that_is_switched_off_has_no_numbers() -> None:
    page = render({"m": replace(STATUS, cache=None)}, PROCESS)
    assert [name for name in read(page) if "cache" in name] == ["vllm:kv_cache_usage_perc", "vllm:cache_config_info"]
    assert 'enable_prefix_caching="False"' in page


def test_gateways_read_the_memory_in_blocks_of_tokens() -> None:
    """llm-d and the Gateway API inference extension parse these labels as integers."""
    (sample,) = read(render({"m": STATUS}, PROCESS))["vllm:cache_config_info"].samples
    _, labels, number = sample
    assert number == 1
    # 1,000 tokens in blocks of 16: 62 whole ones
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (16, 62)
    assert labels["kv_cache_size_tokens"] == "1000"


def test_the_schedulers_of_llm_d_and_of_the_inference_extension_find_what_they_read() -> None:
    """Names and labels of `pkg/epp/framework/plugins/datalayer/extractor/metrics` in llm-d-inference-scheduler."""
    page = render({"m": STATUS}, PROCESS)
    samples = {sample.name: sample for family in text_string_to_metric_families(page) for sample in family.samples}
    read = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    assert [samples[name].value for name in read] == [2, 3, 0.3]
    labels = samples["vllm:cache_config_info"].labels
    assert [int(labels[name]) for name in ("block_size", "num_gpu_blocks")] == [16, 62]
    assert "vllm:lora_requests_info" not in samples


def test_they_find_the_adapters_and_when_they_were_so() -> None:
    """`populateLoRAMetrics` and `getLatestMetric` there: lists with commas, an integer, and a time as the value."""
    status = replace(STATUS, adapters=AdapterStatus(("poet", "judge", "clerk"), ("poet", "judge"), ("judge",)))
    began = time.time()
    page = render({"m": status, "n": STATUS}, PROCESS)
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert families["vllm:lora_requests_info"].type == "gauge"
    assert sample.labels == {
        "model_name": "m",
        "engine": "0",
        "running_lora_adapters": "poet,judge",
        "waiting_lora_adapters": "judge",
        "max_lora": "3",
    }
    assert began <= sample.value <= time.time()


def test_an_empty_or_missing_budget_is_no_division_by_zero() -> None:
    empty = replace(STATUS, memory=MemoryStatus(0, 0, 0, 0, 0, 0, 0, 0, 0))
    assert value(read(render({"m": empty}, PROCESS)), "vllm:kv_cache_usage_perc") == 0


def test_the_client_library_reads_the_page() -> None:
    families = {family.name: family for family in text_string_to_metric_families(render({'a "b"': STATUS}, PROCESS))}
    (usage,) = families["vllm:kv_cache_usage_perc"].samples
    assert (usage.labels, usage.value) == ({"model_name": 'a "b"', "engine": "0"}, 0.3)
    assert families["vllm:request_success"].type == "counter"
    assert {sample.value for sample in families["vllm:cache_config_info"].samples} == {1}
    buckets = [one.value for one in families["vllm:time_to_first_token_seconds"].samples if one.name.endswith("bucket")]
    assert buckets == [3, 3, 5]


def test_right_drafts_are_told_by_their_place_also_where_there_were_none() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(families, name, position=place) for place in "012"] == [9, 4, 0]
    page = render({"m": replace(STATUS, drafts=None)}, PROCESS)
    assert not [name for name in read(page) if "draft" in name or "spec_decode" in name]


def test_every_reason_is_there_from_the_start() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    told = {
        reason: value(families, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "tool_calls", "abort", "error")
    }
    assert told == {"stop": 7, "length": 1, "tool_calls": 0, "abort": 6, "error": 0}


@pytest.mark.parametrize(
    ("name", "buckets", "total"),
    [
        ("vllm:time_to_first_token_seconds", {"0.5": 3, "1.0": 3, "+Inf": 5}, 7.25),
        ("vllm:inter_token_latency_seconds", {"0.1": 8, "+Inf": 17}, 1.5),
        ("vllm:time_per_output_token_seconds", {"0.1": 8, "+Inf": 17}, 1.5),
        ("vllm:e2e_request_latency_seconds", {"2.5": 1, "+Inf": 1}, 0.125),
        ("vllm:request_queue_time_seconds", {"2.5": 1, "+Inf": 1}, 0.125),
    ],
)
def test_buckets_of_a_histogram_are_cumulative_and_the_last_holds_everything(
    name: str, buckets: dict[str, int], total: float
) -> None:
    samples = read(render({"m": STATUS}, PROCESS))[name].samples
    assert {labels["le"]: number for sample, labels, number in samples if sample.endswith("_bucket")} == buckets
    assert [number for sample, _, number in samples if sample.endswith("_sum")] == [total]
    assert [number for sample, _, number in samples if sample.endswith("_count")] == [buckets["+Inf"]]


def test_a_models_name_may_be_any_text() -> None:
    families = read(render({'a "b"\\\nc': STATUS}, PROCESS))
    (_, labels, _) = families["vllm:num_requests_running"].samples[0]
    assert labels["model_name"] == r"a \"b\"\\\nc"


def test_the_disk_tier_has_gauges_and_counters_of_its_own() -> None:
    disk = DiskStatus(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert STATUS.cache is not None
    families = read(render({"m": replace(STATUS, cache=replace(STATUS.cache, disk=disk))}, PROCESS))
    kinds = {labels["kind"]: value for _, labels, value in families["headrace:cache_bytes"].samples}
    assert kinds == {"memory": 50, "disk": 2}
    shown = {name: family.samples[0][2] for name, family in families.items() if "cache_disk" in name}
    names = ("files", "quota_bytes", "pending_bytes")
    totals = ("hits", "hit_tokens", "reads", "read_bytes", "writes", "written_bytes", "dropped")
    assert shown == {
        **dict(zip((f"headrace:cache_disk_{name}" for name in names), (1, 3, 4), strict=True)),
        **dict(zip((f"headrace:cache_disk_{name}_total" for name in totals), range(5, 12), strict=True)),
    }


def test_prompts_that_were_computed_whole_are_told_by_the_reason_also_where_there_were_none() -> None:
    families = read(render({"m": STATUS}, PROCESS))
    assert value(families, "headrace:sparse_bypassed_total", reason="tools") == 4
    assert value(families, "headrace:sparse_bypassed_total", reason="media") == 0


def test_without_a_draft_model_sparse_prefill_has_no_numbers() -> None:
    assert "sparse" not in render({"m": replace(STATUS, sparse=None)}, PROCESS)


def test_the_engines_process_is_measured_once_and_only_if_it_is_another_one() -> None:
    families = read(render({"m": STATUS, "n": STATUS}, PROCESS))
    assert len(families["headrace:engine_process_cpu_seconds_total"].samples) == 1
    here = read(render({"m": replace(STATUS, engine_process=None)}, PROCESS))
    assert not [name for name in here if name.startswith("headrace:engine_process")]
