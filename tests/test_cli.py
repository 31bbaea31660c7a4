"""The command line, run in this process where that is enough, as a process where signals matter."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from minillm.cli import main
from minillm.models.fetch import resolve

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the command opened a network connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """The embedded model with a chat template: it answers nonsense, but it answers."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(resolve("tiny"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_generate_prints_prompt_and_continuation(capsys, no_network):
    assert main(["generate", "Once upon a time", "--max-tokens", "12", "--dtype", "float32"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("Once upon a time") and len(first) > len("Once upon a time") + 12
    main(["generate", "Once upon a time", "--max-tokens", "12", "--dtype", "float32"])
    assert capsys.readouterr().out == first, "greedy by default: twice the same"


def test_generate_several_samples_and_stats(capsys):
    args = ["generate", "It was", "--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "8", "--stats"]
    assert main(args) == 0
    printed = capsys.readouterr()
    samples = printed.out.strip().split("\n\n")
    assert len(samples) == 3 == len(set(samples)) and all(s.lstrip().startswith("It was") for s in samples)
    assert "forward_passes" in printed.err


def test_stop_string_ends_the_text(capsys):
    main(["generate", "And the", "--max-tokens", "40", "--dtype", "float32"])
    text = capsys.readouterr().out.strip()
    word = text.split()[6]
    main(["generate", "And the", "--max-tokens", "40", "--dtype", "float32", "--stop", word])
    shorter = capsys.readouterr().out.rstrip("\n")
    assert text.startswith(shorter) and word not in shorter.removeprefix("And the")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--model", "nope"], "'nope' is no model"),
        (["generate", "x", "--top-p", "7"], "top_p is 7.0"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "x", "--chapter", "99"], "chapter 99 is not built"),
        (["generate", "x", "--max-model-len", "4096"], "max_model_len is 4096; this model's positions end at 1024"),
        (["chat", "--model", "tiny"], "has no chat template"),
        (["bench", "--chapters", "99"], "chapter 99 is not built"),
    ],
)
def test_errors_are_one_line_and_status_one(capsys, args, message):
    assert main(args) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_help_of_every_command_explains_it(capsys):
    for command in ("generate", "chat", "fetch", "doctor", "bench", "trace"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0 and len(capsys.readouterr().out) > 200


def test_doctor_lists_what_is_there(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["model tiny"]["ok"] and found["torch"]["ok"]
    assert main(["doctor"]) == 0
    assert "model tiny" in capsys.readouterr().out


@pytest.fixture
def trace_file(tmp_path):
    """A few requests of Mooncake's form; the first block is a system prompt."""
    path = tmp_path / "trace.jsonl"
    hash_ids = [[0, 1, 2], [3, 4], [0, 1, 2], [0, 5]]
    lines = (
        {"timestamp": 100 * i, "input_length": 512 * len(ids) - 7, "output_length": 9, "hash_ids": ids}
        for i, ids in enumerate(hash_ids)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("cache", ["radix", "block_hash"])
def test_trace_prints_hit_rates(capsys, trace_file, cache):
    args = ["trace", str(trace_file), "--blocks", "4", "100", "--cache", cache]
    assert main([*args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Ten blocks, six different ones. With room for four, [3, 4] costs our caches block 2 and LRU block 0.
    assert (report["requests"], report["optimum"]) == (4, 0.4)
    assert report["rows"] == [
        {"blocks": 4, cache: 0.3, "LRU without prefixes": 0.1},
        {"blocks": 100, cache: 0.4, "LRU without prefixes": 0.4},
    ]
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("4 requests, 10 blocks; at best 0.4000 of them are hits") and "0.3000" in printed


def test_trace_refuses_what_is_none(capsys, trace_file):
    assert main(["trace", str(trace_file), "--blocks", "2"]) == 1
    assert "a prompt takes 3 blocks of 1; the cache has 2" in capsys.readouterr().err
    trace_file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert main(["trace", str(trace_file)]) == 1
    assert "trace.jsonl, line 1: no JSON" in capsys.readouterr().err
    assert main(["trace", str(trace_file.with_name("nowhere"))]) == 1
    assert "No such file" in capsys.readouterr().err


def test_bench_of_the_scoreboard_against_a_peer(capsys):
    assert main(["bench", "--chapters", "0", "--against", "transformers", "--repeats", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["forward_passes"] > 100 and row["ours"] == row["tokens_per_second"]
    assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])


def test_bench_rows_as_json(capsys):
    args = ["bench", "--requests", "1", "3", "--output-len", "4", "--repeats", "1", "--dtype", "float32", "--json"]
    assert main([*args, "--against", "transformers"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["requests"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert row["output_tokens"] == 4 * row["requests"]
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
    assert report["machine"]["torch"]


def test_bench_of_stalls(capsys):
    assert main(["bench", "--stalls", "--repeats", "1", "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    whole, chunked = report["rows"]
    assert (whole["chapter"], chunked["chapter"], report["dtype"]) == (3, 4, "float32")
    assert "gap_p99_ratio" not in whole and chunked["budget"] == 256 and chunked["gap_max_ratio"] > 0
    assert main(["bench", "--stalls", "--repeats", "0", "--dtype", "float32"]) == 0
    title, whole, chunked = capsys.readouterr().out.splitlines()[-3:]
    assert "p99 ÷" in title and whole.split()[0] == "whole" and chunked.split()[0] == "256"


def chat(folder, *args, **more):
    command = [sys.executable, "-m", "minillm.cli", "chat", "--model", folder, "--dtype", "float32", *args]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes, **more)


def test_chat_answers_each_line_and_forgets_on_reset(chat_folder):
    out, err = chat(chat_folder, "--max-tokens", "6").communicate(
        "hello\n/reset\nhello\n/exit\nnever read\n", timeout=60
    )
    first, second = out.splitlines()
    assert first == second != "", err


def test_chat_refuses_what_outgrows_the_context_and_goes_on(chat_folder):
    long = "word " * 1500
    out, err = chat(chat_folder, "--max-tokens", "5").communicate(f"{long}\nhello\n", timeout=60)
    assert "must fit into 1024" in err and len(out.splitlines()) == 1


def test_ctrl_c_stops_the_answer_and_not_the_session(chat_folder):
    process = chat(chat_folder, "--max-tokens", "900")
    process.stdin.write("Tell me a story.\n")
    process.stdin.flush()
    started = process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/reset\nhello\n", timeout=120)
    assert process.returncode == 0, err
    assert started and " …\n" in out and out.split(" …\n", 1)[1].strip(), "the next message is answered"


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m minillm.cli quiz 00 </dev/null | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout


@pytest.mark.parametrize("peer", ["transformers", "transformers-continuous"])
def test_bench_of_skewed_requests_against_a_peer(capsys, peer):
    args = [
        "bench",
        "--requests",
        "4",
        "--skewed",
        "--max-num-seqs",
        "2",
        "--repeats",
        "1",
        "--dtype",
        "float32",
        "--json",
    ]
    assert main([*args, "--model", "tiny-draft", "--against", peer]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 4 * 16 <= row["output_tokens"] <= 4 * 128
    assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])


def test_generate_by_regex_and_by_schema(capsys, tmp_path):
    tail = ["--dtype", "float32", "--max-tokens", "24"]
    assert main(["generate", "Born in ", "--regex", "1[78][0-9]{2}", *tail]) == 0
    assert re.fullmatch("Born in 1[78][0-9]{2}\n", capsys.readouterr().out)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"year": {"enum": [1811, 1813]}}, "required": ["year"]}')
    assert main(["generate", "As JSON: ", "--json-schema", str(schema), *tail]) == 0
    assert '{"year":18' in capsys.readouterr().out
    for wrong, says in (("(", "unclosed group"), ("a", "json and regex")):
        more = ["--json-schema", str(schema)] if wrong == "a" else []
        assert main(["generate", "x", "--regex", wrong, *more, *tail]) == 1
        assert says in capsys.readouterr().err
    assert main(["generate", "x", "--json-schema", str(tmp_path / "nowhere"), *tail]) == 1
    assert "nowhere" in capsys.readouterr().err
