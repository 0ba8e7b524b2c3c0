"""Files of a run, where the disk has no room for a while."""

import contextlib
import json
import resource

from meshwright.cli.run_files import append_line, append_unwritten


@contextlib.contextmanager
def room_for(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_without_room_is_written_with_the_next(tmp_path, capsys):
    path = tmp_path / "failures.jsonl"
    append_line(path, {"number": 0})
    whole = path.read_bytes()
    with room_for(len(whole) + 5):
        append_line(path, {"number": 1})
    assert path.read_bytes() == whole, "half a line stays"
    assert "when there is room again" in capsys.readouterr().err
    append_line(path, {"number": 2})
    with room_for(path.stat().st_size):
        append_line(path, {"number": 3})
    append_unwritten(path)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
