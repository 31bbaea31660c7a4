"""Loaded into the grader's own pytest beside nbval: keeps the kernel alive, reports each cell.

nbval alone notices a dead kernel only after the time-out, gives up the rest of the notebook with it, and waits for
ever on a cell that prints for ever. Here a dead kernel is noticed at once, and a new one, brought to where the old
one was, takes the cells that are left.
"""

import json
import os
import re
import time
from queue import Empty

import nbval.plugin
import psutil
import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import NbCellError

INTERRUPT_SECONDS = 5
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class KernelDied(Exception):
    """The kernel's process ended while a cell ran."""


class WatchedKernel(RunningKernel):
    """nbval's kernel, which also looks whether there is still a kernel to wait for."""

    folder: str
    patience_ends = float("inf")
    waited = 0.0  # seconds, for the newest reply

    def __init__(self, kernel_name, cwd=None, startup_timeout=60):
        super().__init__(kernel_name, cwd=self.folder, startup_timeout=startup_timeout)

    def execute_cell_input(self, *args, **kwargs):
        self.patience_ends = float("inf")
        return super().execute_cell_input(*args, **kwargs)

    def await_reply(self, msg_id, timeout=None):
        """Empty after ``timeout`` seconds that the kernel could use, or twice that where the machine is too busy."""
        began, used = time.monotonic(), self.processor_seconds()
        while True:
            try:
                return super().await_reply(msg_id, timeout=min(0.5, timeout))
            except Empty:
                if not self.is_alive():
                    self.stop()
                    raise KernelDied from None
                self.waited = time.monotonic() - began
                granted = self.processor_seconds() - used
                if self.waited > 2 * timeout or min(self.waited, granted) > timeout:
                    raise

    def processor_seconds(self) -> float:
        """What the kernel's process has used so far; the clock's time where that cannot be found out."""
        try:
            times = psutil.Process(self.km.provisioner.pid).cpu_times()
        except (psutil.Error, AttributeError):
            return time.monotonic()
        return times.user + times.system

    def interrupt(self):
        self.patience_ends = time.monotonic() + INTERRUPT_SECONDS
        super().interrupt()

    def get_message(self, stream, timeout=None):
        if time.monotonic() > self.patience_ends:  # prints on in spite of the interrupt
            raise Empty
        return super().get_message(stream, timeout=timeout)


def pytest_addoption(parser):
    parser.addoption("--lab-folder", help="the kernel's working directory")
    parser.addoption("--lab-events", help="file that gets one line of JSON a cell")


def pytest_configure(config):
    WatchedKernel.folder = config.option.lab_folder
    nbval.plugin.RunningKernel = WatchedKernel
    os.environ["MINILLM_GRADING"] = "1"  # inherited by the kernel: grade() does nothing there


def pytest_collectstart(collector):
    if isinstance(collector, nbval.plugin.IPyNbFile):
        collector.skip_compare += ("stderr",)
        collector.done, collector.stuck = [], {}  # sources that ran well; exercises that hang, with the sentence


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Before a cell: its time limit, and a kernel to run it. An exercise that hung once is not waited for again."""
    notebook = item.parent
    item.config.option.nbval_cell_timeout = item.cell.metadata["seconds"]
    if exercise_of(item.cell) in notebook.stuck:
        pytest.skip()
    if not notebook.kernel.is_alive():
        notebook.setup()
        for source in notebook.done:
            message = notebook.kernel.execute_cell_input(source, allow_stdin=False)
            notebook.kernel.await_reply(message, timeout=item.cell.metadata["seconds"])
            notebook.kernel.await_idle(message, INTERRUPT_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        event = outcome(item, call)
        item.parent.timed_out = False  # or nbval would expect every later cell to fail
        with open(item.config.option.lab_events, "a") as events:
            events.write(json.dumps({"id": item.cell.id, **event}) + "\n")
    return report


def outcome(item, call) -> dict:
    """The fields of ``grader.Outcome`` for a cell that has just been run."""
    notebook, exercise = item.parent, exercise_of(item.cell)
    error = call.excinfo.value if call.excinfo else None
    is_check = "test" in item.cell.metadata.get("tags", [])
    outputs = item.test_outputs or []
    if exercise in notebook.stuck:
        return {"stopped": notebook.stuck[exercise]}
    if notebook.timed_out or isinstance(error, KernelDied | Empty):
        stopped = (
            "the kernel died (out of memory, or a crash in compiled code)"
            if isinstance(error, KernelDied)
            else f"still running after {notebook.kernel.waited:.0f} s, so it was stopped: an endless loop? "
            "Or the machine is busy: then grade again."
        )
        if is_check:
            notebook.stuck[exercise] = stopped
        return {"stopped": stopped}
    for output in outputs:
        if output.output_type == "error":
            value = re.sub(r" \(\S+\.py, line (\d+)\)$", r", line \1 of the cell", output.evalue)  # SyntaxError
            return {"ename": output.ename, "evalue": value, "at": line_in_cell(output.traceback)}
    if error is not None and not isinstance(error, NbCellError):  # a cell that was never run must not pass
        return {"stopped": f"the cell could not be run ({type(error).__name__}: {error})"}
    if is_check:
        return {"printed": "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")}
    notebook.done.append(item.cell.source)
    return {}


def exercise_of(cell) -> str | None:
    return cell.metadata.get("minillm", {}).get("exercise")


def line_in_cell(traceback: list[str]) -> str:
    """The innermost line that stands in a cell, as source: frames of libraries and of the checks are left out."""
    found, in_cell = "", False
    for line in ANSI.sub("", "\n".join(traceback)).splitlines():
        if re.match(r"(Cell In|File )", line):
            in_cell = line.startswith("Cell In")
        elif in_cell and (arrow := re.match(r"-+> *\d+ (.*)", line)):
            found = arrow[1].strip()
    return found
