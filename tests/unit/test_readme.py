"""The commands in README and examples are commands that exist, with configuration keys that exist.

tests/e2e runs the three parts as the README starts them; `make test` is what runs this.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_stream.cli import main

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("examples/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
COMMAND = re.compile(r"^(?:    (?=make |megatron-stream |torchrun )|.*`(?=make |megatron-stream ))([^`#\n]+)", re.M)


def commands(page: Path) -> list[str]:
    return [found.strip().rstrip(".") for found in COMMAND.findall(page.read_text())]


ALL = sorted({(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)})


def test_the_pages_have_commands() -> None:
    assert {"make demo", "make test"} <= set(commands(ROOT / "README.md"))
    assert len(ALL) > 8


@pytest.mark.parametrize(("page", "command"), ALL)
def test_a_command_exists(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        subprocess.run([*words, "-n"], cwd=ROOT, check=True, capture_output=True, timeout=60)
        return
    if words[0] == "torchrun":
        words = words[words.index("megatron_stream.cli") :]
    arguments = words[1:]
    if any(word.startswith("experiment=") for word in arguments):
        overrides = [word for word in arguments if "=" in word and not word.startswith("--")]
        assert main(["rl", "--cfg", *overrides]) == 0, capsys.readouterr().err
    options = [word.split("=")[0] for word in arguments if word.startswith("--")]
    depth = 2 if arguments[0] in ("check", "bench") else 1
    with pytest.raises(SystemExit) as end:
        main([*arguments[:depth], "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in options)
