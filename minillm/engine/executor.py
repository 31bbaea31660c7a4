"""Where a batch is run: one process now; one rank each, under torchrun, from chapter 09 on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from minillm.core.batch import ModelOutput, ScheduledBatch
from minillm.engine.runner import ModelRunner


class Executor(Protocol):
    """Runs passes in the order they are submitted."""

    def submit(self, batch: ScheduledBatch) -> Future[ModelOutput]: ...

    def shutdown(self) -> None: ...


class InProcessExecutor:
    """Runs the pass at once, in the caller's thread; the future is done when ``submit`` returns."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner

    def submit(self, batch: ScheduledBatch) -> Future[ModelOutput]:
        future: Future[ModelOutput] = Future()
        try:
            future.set_result(self.runner.execute(batch))
        except BaseException as error:  # KeyboardInterrupt too: it must reach whoever asks for the result
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        self.runner = None
