"""Programs of calls: SGLang's front end (section 2), on one engine.

A program is a Python function of a state ``s``, which is a text that grows:

    s += "text"                 extend: append text
    s += gen("name", …)         let the model append; SamplingParams' fields, and regex=, json=, choice=, grammar=
    s += select("name", […])    append the choice that the model finds likeliest
    s["name"]                   what a call appended; waits for it
    s.text()                    all of it; waits for all
    forks = s.fork(n)           n copies, whose prefix is computed once and shared through the prefix cache
    forks.join()                wait for them, and take over what they found: s["name"] is then a list

``+=`` only queues: a program runs on until it reads, so the calls of its forks, and of all other programs that run on
the engine, share forward passes. Plain control flow on ``s["name"]`` works, since a program is a thread. Only one
thread runs at a time: each program in turn until it waits, then the engine. So nothing here depends on timing, and the
engine has one caller.

Each call's prompt is the text so far, tokenized as a whole, as if it were written by hand. Where text that follows an
answer joins the answer's last characters in one token, the cached prefix ends before it.

SGLang has more: images, chat roles, ``run`` on remote models with speculative execution of API calls (its section 5),
other ways to choose, a compiler for programs, and joins that concatenate KV, which is not exact.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from minillm.core.outputs import RequestOutput
from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from minillm.engine.engine import Engine
    from minillm.models.tokenizer import Tokenizer

Call = tuple[str | dict, SamplingParams]
Steps = Generator[list[Call], list[RequestOutput], None]

CACHE_SLACK = 16  # characters that copies may each compute rather than wait a pass for them to be in the cache


class Server(Protocol):
    """An ``LLM``, or what queues prompts as it does."""

    engine: Engine

    def enqueue(self, prompts: list, sampling_params: list[SamplingParams]) -> list[str]: ...

    def poll(self, request_ids: Iterable[str]) -> list[RequestOutput]: ...

    def abort(self, request_id: list[str]) -> None: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


# -- what a program may add to its state ----------------------------------------------------------------------------


class Expression:
    """Something to append to a state. Added to one another, and to strings, they are appended in order."""

    def parts(self) -> list[str | Expression]:
        return [self]

    def __add__(self, other: str | Expression) -> Expression:
        return Chain([*self.parts(), *_parts(other)])

    def __radd__(self, other: str) -> Expression:
        return Chain([*_parts(other), *self.parts()])


@dataclass
class Chain(Expression):
    items: list[str | Expression]

    def parts(self) -> list[str | Expression]:
        return self.items


@dataclass
class Gen(Expression):
    """The model goes on; its text is appended, and kept under ``name``."""

    name: str | None
    sampling: dict

    def steps(self, state: State) -> Steps:
        params = replace(state._sampling_params(), **self.sampling)
        (output,) = yield [(state._text, params)]
        state._text += output.outputs[0].text
        state._cached_text = len(state._text)
        state._set(self.name, output.outputs[0].text, output)


@dataclass
class Select(Expression):
    """The likeliest of some choices is appended, and kept under ``name``."""

    name: str | None
    choices: list[str]

    def steps(self, state: State) -> Steps:
        encode, text = state._program.driver.llm.tokenizer.encode, state._text
        before, prompts = encode(text), [encode(text + choice) for choice in self.choices]
        # Where the first choice parts from the text: all are scored from there, though some may part later.
        start = max(1, min(_common(before, prompt) for prompt in prompts))
        if not before or min(map(len, prompts)) <= start:
            raise ValueError(f"select({self.name!r}) has no text before it that its choices could follow")
        if len(prompts) > 1:
            yield from _commit(state)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, prompt_logprobs_start=start)
        outputs = yield [({"prompt_token_ids": prompt}, params) for prompt in prompts]
        scores = {choice: _mean_logprob(output, start) for choice, output in zip(self.choices, outputs, strict=True)}
        best = max(scores, key=scores.get)
        state._text += best
        state._cached_text = len(state._text)
        state._set(self.name, best, scores)


class Commit(Expression):
    """The text so far is computed, so that those who begin with it find it in the prefix cache."""

    name = None

    def steps(self, state: State) -> Steps:
        yield from _commit(state)


def gen(
    name: str | None = None,
    *,
    regex: str | None = None,
    json: str | dict | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    **sampling,
) -> Gen:
    """Let the model append to the state. ``sampling``: fields of SamplingParams, such as max_tokens, stop, temperature.

    What is not given is as in the program's own ``sampling_params``.
    """
    shape = {"regex": regex, "json": json, "choice": choice, "grammar": grammar}
    if any(value is not None for value in shape.values()):
        sampling["structured_outputs"] = StructuredOutputsParams(**shape)
    params = SamplingParams(**sampling)  # what is wrong is refused here, where the program says it
    if params.n != 1:
        raise ValueError(f"n is {params.n}; a state has one text, so fork it into {params.n}")
    return Gen(name, sampling)


def select(name: str | None = None, choices: list[str] | None = None) -> Select:
    """Append the choice whose tokens have the highest mean log-probability, SGLang's token_length_normalized.

    Nothing is sampled: the choices are prompts, scored in one pass. ``meta(name)`` has the score of each. A choice
    whose last tokens follow from its first looks better by this than it is.
    """
    choices = list(choices or [])
    if not choices or any(not isinstance(choice, str) or not choice for choice in choices):
        raise ValueError(f"choices is {choices!r}; it must hold strings of at least one character")
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices is {choices!r}; no two may be equal")
    return Select(name, choices)


def _parts(value: str | Expression) -> list[str | Expression]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Expression):
        return value.parts()
    raise TypeError(f"{value!r} cannot be appended to a state; give a string, gen(…) or select(…)")


def _commit(state: State) -> Steps:
    if state._program.driver.caches and len(state._text) - state._cached_text > CACHE_SLACK:
        yield [(state._text, SamplingParams(max_tokens=1, temperature=0))]
        state._cached_text = len(state._text)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _mean_logprob(output: RequestOutput, start: int) -> float:
    ids = output.prompt_token_ids
    logprobs = [output.prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids))]
    return sum(logprobs) / len(logprobs)


# -- the state ------------------------------------------------------------------------------------------------------


class State:
    """The text of a program, and what its calls found.

    error            what the program raised, or what a call of it failed with; None if all went well
    value            what the program returned
    calls, prompt_tokens, cached_tokens   calls to the engine, tokens of their prompts, and how many of those were found
                     in the prefix cache; those of forks count for the state they came from as well
    """

    def __init__(self, program: _Program, parent: State | None = None, path: str = ""):
        self.error: BaseException | None = None
        self.value = None
        self.calls = self.prompt_tokens = self.cached_tokens = 0
        self._program, self._parent, self._path = program, parent, path
        self._text = parent._text if parent else ""
        self._cached_text = parent._cached_text if parent else 0  # characters that a call has computed
        self._values: dict[str, object] = dict(parent._values) if parent else {}
        self._metas: dict[str, object] = dict(parent._metas) if parent else {}
        self._queue: deque[str | Expression] = deque()
        self._names: Counter[str] = Counter()  # of queued calls
        self._steps: Steps | None = None  # of the call that runs
        self._issued = self._forked = 0
        self._told = False  # its error was raised in the program
        self._error: Exception | None = None  # of a call; its own text ends there
        program.states.append(self)

    def __iadd__(self, part: str | Expression) -> State:
        if self._program.ended:
            raise RuntimeError("the program of this state has ended; nothing can be appended")
        if self._error is None:  # else whoever reads the state is told
            parts = _parts(part)
            self._queue.extend(parts)
            self._names.update(p.name for p in parts if isinstance(p, Expression) and p.name is not None)
        return self

    def __getitem__(self, name: str):
        """What the last call of this name found; waits for it."""
        self._await_name(name)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        """Whether a call of this name was appended, done or not."""
        return name in self._values or self._names[name] > 0

    def meta(self, name: str):
        """How it was found: a RequestOutput for gen, {choice: mean log-probability} for select, a list after join."""
        self._await_name(name)
        return self._metas[name]

    def text(self) -> str:
        """All that was appended; waits for all that is queued."""
        self._await(lambda: self._idle)
        return self._text

    def fork(self, n: int = 2) -> Forks:
        """n states that go on from here, each on its own. Waits for this one, whose prefix they share."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n is {n!r}; it must be a whole number, at least 1")
        self += Commit() if n > 1 else ""
        self._await(lambda: self._idle)
        first = self._forked
        self._forked += n
        return Forks(self, [State(self._program, self, f"{self._path}/{first + i}") for i in range(n)])

    @property
    def _idle(self) -> bool:
        return self._steps is None and not self._queue

    def _await_name(self, name: str) -> None:
        if name not in self._values and not self._names[name] and self._error is None:
            known = ", ".join(map(repr, [*self._values, *filter(self._names.get, self._names)]))
            raise KeyError(f"{name!r}: the state has {known or 'no names'}")
        self._await(lambda: not self._names[name])
        if name not in self._values:
            raise KeyError(f"{name!r}: its call failed") from self._error

    def _await(self, ready: Callable[[], bool]) -> None:
        if not ready() and self._error is None:
            self._program.wait(lambda: self._error is not None or ready())
        if self._error is not None and not self._program.ended:
            self._told = True
            raise self._error

    def _sampling_params(self) -> SamplingParams:
        """The program's own, with a seed of this call if the program has one."""
        params = self._program.params
        self._issued += 1
        if params.seed is None:
            return params
        place = f"{params.seed}{self._path} {self._issued}"
        return replace(params, seed=random.Random(place).getrandbits(63))

    def _set(self, name: str | None, value, meta) -> None:
        if name is not None:
            self._values[name], self._metas[name] = value, meta

    def _count(self, outputs: list[RequestOutput]) -> None:
        self.calls += len(outputs)
        self.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        self.cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        if self._parent is not None:
            self._parent._count(outputs)


class Forks(list):
    """States that came from one."""

    def __init__(self, parent: State, states: list[State]):
        super().__init__(states)
        self._parent = parent

    def join(self) -> None:
        """Wait for all; every name that they added is in the parent the list of what they found (gather_variable)."""
        for state in self:
            state.text()
        parent, before = self._parent, set(self._parent._values)
        for name in dict.fromkeys(name for state in self for name in state._values if name not in before):
            having = [state for state in self if name in state._values]
            parent._set(name, [state._values[name] for state in having], [state._metas[name] for state in having])


# -- running them ---------------------------------------------------------------------------------------------------


class Function:
    """A program, as ``@function`` makes it. Called inside another one, with a state, it runs there."""

    def __init__(self, body: Callable):
        functools.update_wrapper(self, body)
        self._body = body

    def __call__(self, state: State, *args, **kwargs):
        return self._body(state, *args, **kwargs)

    def run(self, llm: Server, /, *, sampling_params: SamplingParams | None = None, **arguments) -> State:
        """Run it alone; raises what it raises."""
        (state,) = run_programs(llm, [functools.partial(self._body, **arguments)], sampling_params)
        if state.error is not None:
            raise state.error
        return state

    def run_batch(
        self, llm: Server, arguments: Iterable[dict], /, *, sampling_params: SamplingParams | None = None
    ) -> list[State]:
        """Run it with each of these arguments, together. Who fails has an ``error`` and does not harm the others."""
        return run_programs(llm, [functools.partial(self._body, **each) for each in arguments], sampling_params)


def function(body: Callable) -> Function:
    """Decorator of a program: a function whose first argument is the state."""
    return Function(body)


def run_programs(
    llm: Server,
    programs: Iterable[Callable[[State], object]],
    sampling_params: SamplingParams | None = None,
    at_once: int = 256,
) -> list[State]:
    """Run programs together on one engine; the state of each, in their order. ``state.error`` says who failed.

    ``sampling_params``: what ``gen`` takes where it says nothing else. A seed there gives every call of every program
    one of its own. ``at_once``: programs that have begun and not ended, each a thread.
    """
    params = sampling_params or SamplingParams()
    if params.n != 1:
        raise ValueError(f"n is {params.n} in a program's sampling_params; a state has one text, so fork it instead")
    if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
        raise ValueError(f"at_once is {at_once!r}; it must be a whole number, at least 1")
    driver = _Driver(llm)
    for number, body in enumerate(programs):
        driver.programs.append(_Program(driver, body, params, f" {number}"))
    driver.run(at_once)
    return [program.root for program in driver.programs]


class _Cancelled(BaseException):
    """Ends a program whose driver has gone; no Exception, so that no program takes it for its own."""


class _Program:
    """A thread that runs only while its driver waits for it."""

    def __init__(self, driver: _Driver, body: Callable[[State], object], params: SamplingParams, name: str):
        self.driver, self.body, self.params = driver, body, params
        self.states: list[State] = []
        self.root = State(self, path=name)
        self.raised: BaseException | None = None
        self.started = self.ended = self.cancelled = False
        self.ready: Callable[[], bool] = lambda: True
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=f"program{name}", daemon=True)

    def resume(self) -> None:
        """Let it run until it waits or ends."""
        if not self.started:
            self.started = True
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Called by the program: let others run until ``ready``."""
        if threading.current_thread() is not self._thread:
            raise RuntimeError("a state may be read by its own program only, until that has ended")
        self.ready = ready
        self._back.release()
        self._go.acquire()
        if self.cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        self.cancelled = True
        if self.started and not self.ended:
            self._go.release()
            self._thread.join(timeout=10)
        self.ended = True

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.cancelled:
                self.root.value = self.body(self.root)
        except _Cancelled:
            pass
        except BaseException as error:
            self.raised = error
        finally:
            self.ended = True
            self._back.release()


class _Driver:
    """Runs programs until they wait, then the engine until one of them need not."""

    def __init__(self, llm: Server):
        self.llm = llm
        self.caches = llm.engine.config.prefix_cache != "none"
        self.programs: list[_Program] = []
        self._running: dict[str, State] = {}  # request id -> whose call it is
        self._calls: dict[State, tuple[dict[str, RequestOutput | None], str | None]] = {}  # outputs, the call's name
        self._fault: Exception | None = None  # of the last pass that failed

    def run(self, at_once: int) -> None:
        try:
            while True:
                alive = sum(program.started and not program.ended for program in self.programs)
                for program in self.programs:
                    if program.ended or not (program.started or alive < at_once) or not program.ready():
                        continue
                    alive += not program.started
                    program.resume()
                    self._advance(program)
                    alive -= program.ended
                if any(p.ready() for p in self.programs if p.started and not p.ended):
                    continue
                if self._running:
                    self._collect()
                elif all(program.ended for program in self.programs):
                    break
                elif all(program.started for program in self.programs):
                    raise RuntimeError("programs wait, and for no call")  # a fault of this file
            for program in self.programs:
                self._settle(program)
        finally:  # in the good case there is nothing left
            for program in self.programs:
                program.cancel()
            self._drop(list(self._running))

    def _advance(self, program: _Program) -> None:
        if program.raised is not None:  # nothing that it queued is wanted any more
            self._drop([i for i, state in self._running.items() if state._program is program])
            for state in program.states:
                state._queue.clear()
                state._names.clear()
        for state in program.states:
            if state._steps is None and state._queue:
                self._next(state)

    def _next(self, state: State) -> None:
        """Take what is queued up to the next call, and make that."""
        while state._queue:
            part = state._queue.popleft()
            if isinstance(part, str):
                state._text += part
                continue
            state._steps = part.steps(state)
            if self._go_on(state, None, part.name):
                return

    def _go_on(self, state: State, outputs: list[RequestOutput] | None, name: str | None) -> bool:
        """Hand a call what it waited for. False if it is done, or has failed."""
        try:
            calls = state._steps.send(outputs)
            ids = self.llm.enqueue([prompt for prompt, _ in calls], [params for _, params in calls])
        except StopIteration:
            state._steps = None
            if name is not None:
                state._names[name] -= 1
            return False
        except Exception as error:
            self._fail(state, error)
            return False
        self._calls[state] = dict.fromkeys(ids), name
        self._running.update(dict.fromkeys(ids, state))
        return True

    def _collect(self) -> None:
        """One pass at most; states whose calls are done go on."""
        try:
            outputs = self.llm.poll(list(self._running))
        except Exception as error:
            self._fault = error
            if not self.llm.engine.alive or not self.llm.engine.has_runnable_requests():
                for state in dict.fromkeys(self._running.values()):
                    self._fail(state, error)
                self._drop(list(self._running))
            return
        done = []
        for output in outputs:
            if output.finished and (state := self._running.pop(output.request_id, None)) is not None:
                waiting, _ = self._calls[state]
                waiting[output.request_id] = output
                if all(waiting.values()):
                    done.append(state)
        for state in done:
            self._finish_call(state)

    def _finish_call(self, state: State) -> None:
        waiting, name = self._calls.pop(state)
        outputs = list(waiting.values())
        state._count(outputs)
        for output in outputs:
            if output.outputs[0].finish_reason == "abort":
                why = output.outputs[0].stop_reason or self._fault or "somebody ended it"
                error = RuntimeError(f"a call was aborted: {why}")
                error.__cause__ = self._fault
                self._fail(state, error)
                return
        if not self._go_on(state, outputs, name):
            self._next(state)

    @staticmethod
    def _fail(state: State, error: Exception) -> None:
        state.error = state._error = error
        state._steps = None
        state._queue.clear()
        state._names.clear()

    @staticmethod
    def _settle(program: _Program) -> None:
        """What the program was never told of, because it did not ask, is its error in the end."""
        untold = (state._error for state in program.states if state._error is not None and not state._told)
        program.root.error = program.raised or next(untold, None)

    def _drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            state = self._running.pop(request_id)
            self._calls.pop(state, None)
            state._steps = None
        if request_ids and self.llm.engine.alive:
            self.llm.abort(request_ids)
            self.llm.poll(request_ids)
