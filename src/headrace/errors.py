"""Every error that Headrace raises on purpose.

HeadraceError
├── RequestError              the request can't be served
│   ├── InvalidRequest        400  a field is wrong; `param` names it
│   │   ├── UnsupportedField  400  a known field that is not supported
│   │   ├── ContextTooLong    400  prompt and answer don't fit the context
│   │   └── GrammarFailed     400  an answer's grammar can't continue
│   ├── AuthenticationFailed  401  no key or a wrong one
│   ├── OriginRefused         403  a browser page that was not allowed
│   ├── HostRefused           403  a name that is not the server's own
│   ├── NotFound              404  a request, route, adapter, response item, page file …
│   │   ├── ModelNotFound     404
│   │   └── PreviousResponseNotFound 404  a request continues a response that is not stored
│   ├── MethodNotAllowed      405  the route exists
│   ├── BodyTooSlow           408  the body did not arrive in time
│   ├── BodyTooLarge          413  the body is over the limit
│   ├── RequestCancelled      499  the request was cancelled by its id
│   └── Overloaded            429  the queue is full; `retry_after_s`: when to retry
│       └── Draining          503  the server is shutting down and takes no new requests
├── ModelUnavailable          503  a served model can't be loaded now; says why
├── GenerationFailed          500  one request's work raised; the engine goes on
├── EngineDead                503  what would answer has ended: the engine, its replica, or the server
├── EngineHangs               503  the engines' process does not answer; it may go on
├── HandoverBroken            502  another server's answer broke off after its beginning
├── ConfigError                    a flag or an environment value is wrong
└── ModelError                     a model can't be loaded; says what is missing
"""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Base of the tree. `status`, `code` and `param` are what an API shows."""

    status = 500
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        # Survives pickling: constructors of subclasses have other parameters.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[HeadraceError], args: tuple[Any, ...]) -> HeadraceError:
    return kind.__new__(kind, *args)


class RequestError(HeadraceError):
    status = 400
    code: str | None = None


class InvalidRequest(RequestError):
    code = "invalid_value"


class UnsupportedField(InvalidRequest):
    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context.

    num_tokens: of the prompt, or a lower bound. max_model_len: of the context. Both None if not the prompt alone is too
    long.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str, num_tokens: int | None = None, max_model_len: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len

    @classmethod
    def of_prompt(cls, max_model_len: int, num_tokens: int, param: str, *, at_least: bool = False) -> ContextTooLong:
        """The error for a prompt that alone is too long, in the wording that agents recognise.

        param: the prompt's field. at_least: num_tokens is a lower bound.
        """
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, your {param} resulted in "
            f"{'at least ' if at_least else ''}{num_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
            num_tokens=num_tokens,
            max_model_len=max_model_len,
        )


class GrammarFailed(InvalidRequest):
    """An answer can't continue under its grammar, which became too complex or allows no token."""

    code = "grammar_failed"


class AuthenticationFailed(RequestError):
    status = 401
    code = "invalid_api_key"


class OriginRefused(RequestError):
    status = 403
    code = "origin_refused"


class HostRefused(RequestError):
    status = 403
    code = "host_refused"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(RequestError):
    status = 408
    code = "request_timeout"


class BodyTooLarge(RequestError):
    status = 413
    code = "request_too_large"


class RequestCancelled(RequestError):
    status = 499
    code = "request_cancelled"


class Overloaded(RequestError):
    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    status = 503
    code = "draining"


class ModelUnavailable(HeadraceError):
    status = 503
    code = "model_unavailable"


class GenerationFailed(HeadraceError):
    """Computing one request raised; the cause is chained and logged."""

    code = "generation_failed"


class EngineDead(HeadraceError):
    status = 503
    code = "engine_dead"

    @classmethod
    def because(cls, reason: str | None) -> EngineDead:
        return cls(f"the engine is not running: {reason}")


class EngineHangs(HeadraceError):
    status = 503
    code = "engine_hangs"


class HandoverBroken(HeadraceError):
    status = 502
    code = "handover_broken"


class ConfigError(HeadraceError):
    """A flag or an environment value is wrong; the message names it."""

    @classmethod
    def of_key(cls, url: str, flag: str, *, is_given: bool) -> ConfigError:
        """For a server that has answered 401."""
        given = "refuses this key" if is_given else "needs a key"
        return cls(f"the server at {url} {given}: give it with {flag} KEY")


class ModelError(HeadraceError):
    """A model can't be loaded; the message says what is missing."""
