"""``docs/bench.md`` names every flag of the command, its other names and its exit codes."""

import re
from pathlib import Path

import typer
from evenflow.cli.bench import command
from evenflow.cli.bench_commands import bench

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()


def test_every_flag_is_documented() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(bench)
    flags = {
        frozenset(parameter.opts)
        for parameter in typer.main.get_command(app).params
        if parameter.param_type_name == "option" and "--help" not in parameter.opts
    }
    rows = re.findall(r"^\| (`--[a-z-]+`) \|([^|]*)\|", PAGE, re.MULTILINE)
    assert {frozenset(re.findall(r"`(-[^`]+)`", flag + also)) for flag, also in rows} == flags


def test_every_exit_code_is_documented() -> None:
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))
    assert codes == set(re.findall(r"(\d+) (?:all|requests|asked|interrupted)", command.__doc__ or ""))
