import json

import pytest

from minillm.core.traces import TraceRequest, read_mooncake

LINE = {"timestamp": 1500, "input_length": 1025, "output_length": 3, "hash_ids": [0, 7, 8]}


def write(tmp_path, *lines) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_a_trace_is_read(tmp_path):
    path = write(tmp_path, LINE, "", LINE | {"input_length": 1, "hash_ids": [0], "more": "ignored"})
    assert read_mooncake(path) == [TraceRequest(1.5, 1025, 3, [0, 7, 8]), TraceRequest(1.5, 1, 3, [0])]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"no JSON \(Expecting property name"),
        ("[1, 2]", "no JSON object"),
        (LINE | {"timestamp": -1}, "timestamp is -1; it must be a whole number, at least 0"),
        (LINE | {"input_length": "12"}, "input_length is '12'"),
        (LINE | {"output_length": True}, "output_length is True"),
        (LINE | {"output_length": 1.5}, "output_length is 1.5"),
        ({name: LINE[name] for name in ("timestamp", "input_length", "hash_ids")}, "output_length is None"),
        (LINE | {"hash_ids": None}, "hash_ids is None; it must be a list of whole numbers"),
        (LINE | {"hash_ids": [1, "2", 3]}, "hash_ids is .* it must be a list of whole numbers"),
        (LINE | {"hash_ids": [1, 2]}, "2 hash_ids; 1025 tokens are 3 blocks of 512"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, LINE, "", line, "{")
    with pytest.raises(ValueError, match=f"trace.jsonl, line 3: {message}") as raised:
        read_mooncake(path)
    assert "\n" not in str(raised.value)


def test_an_empty_file_is_no_trace(tmp_path):
    with pytest.raises(ValueError, match="holds no requests"):
        read_mooncake(write(tmp_path, ""))
