"""Commands whose code is in the repository: they run from a checkout, and an installed package says where they are."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from luffy import repository
from luffy.cli import app
from luffy.errors import UserError

NAMES = sorted(repository.COMMANDS)


@pytest.mark.parametrize("command", NAMES)
def test_a_checkout_runs_the_command_with_its_own_help_and_options(command):
    shown = CliRunner().invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0 and f"Usage: luffy {command}" in shown.stdout
    wrong = CliRunner().invoke(app, [*command.split(), "--no-such-option"])
    assert wrong.exit_code == 2 and "No such option: --no-such-option" in wrong.output


@pytest.mark.parametrize("command", NAMES)
def test_an_installed_package_names_the_command_of_the_repository(command, monkeypatch, tmp_path):
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    result = CliRunner().invoke(app, [*command.split(), "a b", "--json", "x"])
    module = repository.COMMANDS[command][0]
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == (
        f"luffy {command} is in luffy's repository, not in the package; run there: python -m {module} 'a b' --json x"
    )


def test_it_is_one_line_and_exit_code_2(tmp_path):
    code = "import sys; sys.argv[1:] = ['bench', 'rollout']\n"
    code += f"from pathlib import Path; import luffy.repository as r; r.ROOT = Path({str(tmp_path)!r})\n"
    code += "from luffy.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"luffy: error: luffy bench is in .*: python -m benchmarks.speed rollout\n", done.stderr)


def test_groups_list_the_commands():
    assert "Measure speed and memory" in CliRunner().invoke(app, ["--help"]).stdout
