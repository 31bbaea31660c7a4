import pytest

from minillm.core.batch import ScheduledBatch
from minillm.engine.executor import InProcessExecutor


class FakeRunner:
    def __init__(self, error: BaseException | None = None):
        self.error = error

    def execute(self, batch):
        if self.error is not None:
            raise self.error
        return batch.step


def test_the_result_is_there_at_once():
    future = InProcessExecutor(FakeRunner()).submit(ScheduledBatch(step=7))
    assert future.done()
    assert future.result() == 7


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_errors_wait_for_whoever_asks(error):
    future = InProcessExecutor(FakeRunner(error)).submit(ScheduledBatch(step=0))
    with pytest.raises(type(error)):
        future.result()


def test_shutdown_lets_go_of_the_runner():
    executor = InProcessExecutor(FakeRunner())
    executor.shutdown()
    executor.shutdown()
    assert executor.runner is None
