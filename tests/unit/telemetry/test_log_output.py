"""Log lines go to standard error, standard output, or a file that is rotated."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.telemetry.log_output import KEPT_FILES, RotatedFile, open_log_output


def test_a_full_file_is_renamed_and_the_oldest_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.log"
    output = RotatedFile(path, max_bytes=7)
    for number in range(KEPT_FILES + 3):
        output.write(f"line {number}\n")
    output.write("last\n")
    output.close()
    assert path.read_text() == "last\n"
    older = [Path(f"{path}.{number}").read_text() for number in range(1, KEPT_FILES + 1)]
    assert older == [f"line {KEPT_FILES + 2 - number}\n" for number in range(KEPT_FILES)]
    assert len(list(tmp_path.iterdir())) == KEPT_FILES + 1


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.log"
    path.write_text("before\n")
    output = open_log_output(str(path))
    assert isinstance(output, RotatedFile)
    output.write("after \ud800\n")
    output.close()
    assert path.read_text() == "before\nafter \\ud800\n"


@pytest.mark.parametrize("output", ["sterr", "/no/such/folder/dynamo.log"])
def test_what_is_no_destination_is_refused(output: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_log_output(output)
    assert caught.value.hint
