"""The registry of handlers: which function runs a kind, with which arguments and options."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from ._adapters import AsyncCallerConnection, CallerConnection, is_async
from ._decode import Decoder, Mismatch, compile_type, decode_fields
from ._executors import ExecutorSource
from .async_client import AsyncClient
from .client import Client
from .job import Job
from .models import InsertResult, Json
from .outcomes import Seconds, as_seconds
from .retry import Policy, Retry, as_policy

P = ParamSpec("P")
R = TypeVar("R")

SyncTarget = Client | CallerConnection
AsyncTarget = AsyncClient | AsyncCallerConnection
Unique = Mapping[str, Json] | bool  # True: the defaults of the database
CallNext = Callable[[Job], Awaitable[Any]]
Middleware = Callable[[Job, CallNext], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Options of a kind; None leaves a choice to the database."""

    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    run_at: datetime | None = None
    deadline: float | None = None
    keep_result: bool | None = None
    unique: Unique | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, Json] = field(default_factory=dict)
    opts: Mapping[str, Json] = field(default_factory=dict)

    def insert_arguments(self) -> dict[str, Any]:
        """The keyword arguments of insert_job."""
        opts: dict[str, Json] = dict(self.opts)
        if self.deadline is not None:
            opts["deadline_seconds"] = self.deadline
        if self.keep_result:
            opts["keep_result"] = True
        if self.unique is not None and self.unique is not False:
            opts["unique"] = {} if self.unique is True else dict(self.unique)
        if self.tags:
            opts["tags"] = list(self.tags)
        if self.metadata:
            opts["metadata"] = dict(self.metadata)
        return {
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "run_at": self.run_at,
            "opts": opts or None,
        }


class Parameters:
    """How a job's arguments become the call of a function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        hints = _type_hints(function, parameters, name)
        self.takes_job = bool(parameters) and _is_job(parameters[0], hints)
        if self.takes_job:
            parameters = parameters[1:]
        self.signature = signature.replace(parameters=parameters)
        self.positional: list[str] = []
        self.decoders: dict[str, tuple[Decoder, bool]] = {}
        self.rest: Decoder | None = None
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TypeError(f"{name}: a handler cannot take *{parameter.name}")
            decoder = compile_type(hints.get(parameter.name, Any), f"{name}({parameter.name})")
            if parameter.kind is parameter.VAR_KEYWORD:
                self.rest = decoder
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.positional.append(parameter.name)
            self.decoders[parameter.name] = (decoder, parameter.default is parameter.empty)
        # Only then the whole argument object is the handler's own affair.
        self.job_only = self.takes_job and not parameters

    def encode(self, *args: Any, **kwargs: Any) -> dict[str, Json]:
        """The arguments to enqueue for a call."""
        if self.job_only:
            if args:
                raise TypeError("a handler that takes only the job is enqueued by keywords")
            return kwargs
        bound = self.signature.bind(*args, **kwargs).arguments
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        return dict(bound)

    def decode(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the call; Mismatch when they do not fit."""
        args: list[Any] = [job] if self.takes_job else []
        if self.job_only:
            return args, {}
        given = job.args
        if not isinstance(given, dict):
            raise Mismatch("args: expected an object with the handler's parameters")
        rest: dict[str, Any] = {}
        if self.rest is not None:
            extra = given.keys() - self.decoders.keys()
            rest = {key: self.rest(given[key], key) for key in extra}
            given = {key: value for key, value in given.items() if key not in extra}
        kwargs = decode_fields(given, self.decoders, "")
        for name in self.positional:
            if name not in kwargs:
                break
            args.append(kwargs.pop(name))
        return args, kwargs | rest


class Task(Generic[P, R]):
    """A handler and its options. Calling it calls the function itself."""

    __name__: str

    def __init__(
        self,
        function: Callable[..., R],
        *,
        kind: str,
        options: TaskOptions,
        retry: Policy | None = None,
        never_retry: tuple[type[BaseException], ...] = (),
        timeout: float | None = None,
        completes_itself: bool = False,
        interrupt_on_cancel: bool = False,
        executor: ExecutorSource | None = None,
        middleware: tuple[Middleware, ...] = (),
    ) -> None:
        self.function = function
        self.kind = kind
        self.defaults = options
        self.retry = retry
        self.never_retry = never_retry
        self.timeout = timeout
        self.completes_itself = completes_itself
        self.interrupt_on_cancel = interrupt_on_cancel
        self.executor = executor
        self.middleware = middleware
        self.is_async = _is_async(function)
        if self.is_async and executor is not None:
            raise TypeError(f'"{kind}": an async handler runs in the event loop, in no executor')
        if not self.is_async and (timeout is not None or interrupt_on_cancel):
            raise TypeError(
                f'"{kind}": a def handler cannot be stopped from outside; use deadline, and '
                "job.is_cancelled() in the handler"
            )
        self.parameters = Parameters(function, kind)
        functools.update_wrapper(cast(Any, self), function)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<awa.Task {self.kind}>"

    def __reduce__(self) -> str:
        # By name, as functions are: a process pool finds this object, not the bare function.
        return cast(str, getattr(self.function, "__qualname__", self.kind))

    def options(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        deadline: Seconds | None = None,
        keep_result: bool | None = None,
        unique: Unique | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Json] | None = None,
        ordering_key: str | None = None,
        trace: str | None = None,
        opts: Mapping[str, Json] | None = None,
    ) -> Insertion[P]:
        """The same task with other options for one insert: task.options(...).insert(...)."""
        merged = dict(self.defaults.opts) | dict(opts or {})
        if delay is not None:
            merged["delay_seconds"] = as_seconds(delay, "delay")
        if ordering_key is not None:
            merged["ordering_key"] = ordering_key
        if trace is not None:
            merged["trace"] = trace
        changes: dict[str, Any] = {
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
            "run_at": run_at,
            "deadline": None if deadline is None else as_seconds(deadline, "deadline"),
            "keep_result": keep_result,
            "unique": unique,
            "tags": tags,
            "metadata": metadata,
        }
        changes = {key: value for key, value in changes.items() if value is not None}
        return Insertion(self, replace(self.defaults, opts=merged, **changes))

    @overload
    def insert(self, target: SyncTarget, /, *args: P.args, **kwargs: P.kwargs) -> InsertResult: ...

    @overload
    def insert(
        self, target: AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, InsertResult]: ...

    def insert(
        self, target: SyncTarget | AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> InsertResult | Coroutine[Any, Any, InsertResult]:
        """Enqueue a call of the handler, in the connection's own transaction if it is one."""
        return Insertion[P](self, self.defaults).insert(target, *args, **kwargs)

    def item(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Json]:
        """The same call as an item of insert_jobs."""
        return Insertion[P](self, self.defaults).item(*args, **kwargs)


class Insertion(Generic[P]):
    """A task with the options of one insert."""

    def __init__(self, task: Task[P, Any], options: TaskOptions) -> None:
        self._task = task
        self._options = options

    @overload
    def insert(self, target: SyncTarget, /, *args: P.args, **kwargs: P.kwargs) -> InsertResult: ...

    @overload
    def insert(
        self, target: AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, InsertResult]: ...

    def insert(
        self, target: SyncTarget | AsyncTarget, /, *args: P.args, **kwargs: P.kwargs
    ) -> InsertResult | Coroutine[Any, Any, InsertResult]:
        """Enqueue a call of the handler, in the connection's own transaction if it is one."""
        payload = self._task.parameters.encode(*args, **kwargs)
        arguments = self._options.insert_arguments()
        client: Client | AsyncClient
        if isinstance(target, Client | AsyncClient):
            client = target
        elif is_async(target):
            client = AsyncClient(target)
        else:
            client = Client(cast(CallerConnection, target))
        return client.insert_job(self._task.kind, payload, **arguments)

    def item(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Json]:
        """The same call as an item of insert_jobs."""
        item = {"kind": self._task.kind, "args": self._task.parameters.encode(*args, **kwargs)}
        item |= self._options.insert_arguments()
        return {key: value for key, value in item.items() if value is not None}


class _Decorator(Protocol):
    @overload
    def __call__(self, function: Callable[[Job], R], /) -> Task[..., R]: ...

    @overload
    def __call__(  # type: ignore[overload-cannot-match]
        self, function: Callable[Concatenate[Job, P], R], /
    ) -> Task[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class Handlers:
    """A set of handlers by kind. Sets combine with `|`; nothing is registered globally."""

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        *,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._middleware = tuple(middleware)
        for kind, function in (handlers or {}).items():
            self.add(kind, function)

    def add(self, kind: str, function: Callable[..., Any]) -> None:
        """Register a function, or a task of another set under this kind."""
        if isinstance(function, Task):
            if function.kind != kind:
                raise ValueError(f'task "{function.kind}" cannot be registered as "{kind}"')
            self._put(function)
        else:
            self.task(kind=kind)(function)

    def task(
        self,
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        retry: Retry | None = None,
        never_retry: Sequence[type[BaseException]] = (),
        timeout: Seconds | None = None,
        deadline: Seconds | None = None,
        keep_result: bool | None = None,
        unique: Unique | None = None,
        completes_itself: bool = False,
        interrupt_on_cancel: bool = False,
        executor: ExecutorSource | None = None,
        tags: Sequence[str] = (),
    ) -> _Decorator:
        """Register the decorated function; its name is the kind unless one is given.

        `timeout` stops the handler in this process and counts as a failure; `deadline` lets the
        database take the attempt away, whatever became of the process, and an async handler that
        goes on for more than a second after that is cancelled. `unique` is the option of
        insert_job, or True for its defaults: a second insert answers with the job that there is
        already. `completes_itself` says
        that the handler calls job.complete(conn) in its own transaction. `interrupt_on_cancel`
        stops an async handler when its job is cancelled. A def handler runs in `executor`, or in
        what the function given as `executor` makes, instead of in the worker's.
        """

        def decorate(function: Callable[..., Any], /) -> Task[..., Any]:
            task: Task[..., Any] = Task(
                function,
                kind=kind or function.__name__,
                options=TaskOptions(
                    queue=queue,
                    priority=priority,
                    max_attempts=max_attempts,
                    deadline=None if deadline is None else as_seconds(deadline, "deadline"),
                    keep_result=keep_result,
                    unique=unique,
                    tags=tuple(tags),
                ),
                retry=as_policy(retry),
                never_retry=tuple(never_retry),
                timeout=None if timeout is None else as_seconds(timeout, "timeout"),
                completes_itself=completes_itself,
                interrupt_on_cancel=interrupt_on_cancel,
                executor=executor,
                middleware=self._middleware,
            )
            self._put(task)
            return task

        return cast(_Decorator, decorate)

    def _put(self, task: Task[..., Any]) -> None:
        if task.kind in self._tasks and self._tasks[task.kind] is not task:
            raise ValueError(f'two handlers for kind "{task.kind}"')
        self._tasks[task.kind] = task

    def __or__(self, other: Handlers) -> Handlers:
        if not isinstance(other, Handlers):
            return NotImplemented
        both = Handlers()
        for task in (*self._tasks.values(), *other._tasks.values()):
            both._put(task)
        return both

    def __getitem__(self, kind: str) -> Task[..., Any]:
        return self._tasks[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._tasks

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def queues(self) -> list[str]:
        """The queues that the tasks name, `default` for those that name none."""
        return sorted({task.defaults.queue or "default" for task in self}) or ["default"]


def _type_hints(
    function: Callable[..., Any], parameters: list[inspect.Parameter], name: str
) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function).__call__
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        if len(parameters) <= 1 and all(p.name == "job" for p in parameters):
            return {}
        raise TypeError(
            f"{name}: the type hints cannot be evaluated: {error}; import the types at module "
            "level, outside of TYPE_CHECKING"
        ) from error


def _is_job(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
        return False
    hint = hints.get(parameter.name)
    return hint is Job or (hint is None and parameter.name == "job")


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    )
