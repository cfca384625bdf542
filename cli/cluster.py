"""Reads ``cluster.toml``: the options of ``serve``, the replicas one by one, and the addresses for other machines.

::

    model = "smollm2-135m"
    stages = 2
    port = 8000

    [network]
    workers = "tcp://0.0.0.0:5556"
    clients = "tcp://0.0.0.0:5557"
    keys = "keys"

    [[replica]]
    launcher = "local"

    [[replica]]
    launcher = "external"

The names are those of ``ServeOptions`` and ``Network``; what is not one of them is refused with the nearest that is.
Relative paths are relative to the file's folder.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import UsageError
from .options import SLO_TOKENS, Network, ServeOptions, parse_bytes

T = TypeVar("T")

LAUNCHERS = ("local", "external")
#: Said by [[replica]] and [network], not by names at the top.
_ELSEWHERE = {"external", "network"}
_ALIASES = {"enable_prefix_caching": "prefix_caching", "max_num_batched_tokens": "token_budget"}
_AT = re.compile(r" - at `\$\.?(.*)`$")


def read_cluster(path: Path) -> ServeOptions:
    """What the file asks for, not yet settled. Raises ``UsageError``."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}.") from None
    network = table.pop("network", {})
    replicas = table.pop("replica", None)
    names = {field.name for field in dataclasses.fields(ServeOptions)} - _ELSEWHERE
    values = _known(path, "", table, names, ("network", "replica"))
    if isinstance(values.get("kv_cache_memory"), str):
        values["kv_cache_memory"] = parse_bytes(values["kv_cache_memory"])
    if isinstance(values.get("journal_size"), str):
        values["journal_size"] = parse_bytes(values["journal_size"], "journal_size")
    if "model" not in values:
        raise UsageError(f"{path} names no model.")
    if replicas is not None:
        if "replicas" in values:
            raise UsageError(f"{path} has both replicas and [[replica]]: say it once.")
        values["external"] = _external(path, replicas)
        values["replicas"] = len(replicas)
    if "tbt_slo" in values:
        values.setdefault("token_budget", SLO_TOKENS)
    values["network"] = _network(path, network)
    options = _convert(path, values, ServeOptions, "")
    if (path.parent / options.model).exists():
        options = dataclasses.replace(options, model=str(path.parent / options.model))
    return options


def _network(path: Path, table: object) -> Network:
    names = [field.name for field in dataclasses.fields(Network)]
    network = _convert(path, _known(path, "[network] ", table, names), Network, "[network] ")
    if network.keys is not None:
        network = dataclasses.replace(network, keys=str(path.parent / Path(network.keys).expanduser()))
    return network


def _external(path: Path, replicas: object) -> list[int]:
    if not isinstance(replicas, list) or not replicas:
        raise UsageError(f"{path}: replica is written as [[replica]], once for each.")
    external: list[int] = []
    for index, entry in enumerate(replicas):
        where = f"[[replica]] {index} "
        launcher = _known(path, where, entry, ["launcher"]).get("launcher", "local")
        if launcher not in LAUNCHERS:
            raise UsageError(f"{path}: {where}launcher {launcher!r} is not one of {', '.join(LAUNCHERS)}.")
        if launcher == "external":
            external.append(index)
    return external


def _known(path: Path, where: str, table: object, names: Iterable[str], tables: Iterable[str] = ()) -> dict[str, Any]:
    """The table with its names as ours. Raises ``UsageError`` for a name that is none."""
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {where.strip()} must be a table.")
    names = sorted(names)
    known: dict[str, Any] = {}
    for given, value in table.items():
        name = str(given).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in names:
            near = difflib.get_close_matches(name, [*names, *tables], 1, 0.0)[0]
            raise UsageError(f"{path}: {where}{given} is not known; the nearest name is {near}.")
        if name in known:
            raise UsageError(f"{path}: {where}{name} is given twice.")
        known[name] = value
    return known


def _convert(path: Path, values: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.search(text)
        name = "" if found is None else found[1]
        problem = _AT.sub("", text).replace("`", "")
        raise UsageError(f"{path}: {where}{name}: {problem[:1].lower()}{problem[1:]}.") from None
