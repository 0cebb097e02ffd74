"""What is stored of earlier prompts, what a new one can take from it, and how many bytes it may keep.

The life of a prompt (one thread, the engine's):

    key = cache_key(token_ids, media)
    match = tree.match(namespace, key, limit=len(key) - 1)
    tree.use(match), tree.lock(match)
    plan = plan_snapshots(match, boundaries, ...)        # where to take snapshots, what to report
    held = tree.read(match)                              # the pieces to restore from
    tree.unlock(match)
    tree.insert(namespace, key, make_span=..., snapshots=...)  # in the prefill, at its end, at an abort, at the finish
    usage.reclaim(num_bytes, tree.evict)                 # before anything that needs bytes
"""
