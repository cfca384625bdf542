"""SMP-7: what the model's makers advise holds where a request says nothing, and everybody can see it."""

import json
from pathlib import Path

import pytest
import structlog
from evenflow.control.gateway.defaults import SamplingDefaults, read_defaults
from gateway_harness import drive, gateway, says


def advise(folder: Path, **values: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_defaults(folder)


def test_smp_7_a_request_goes_before_the_model_and_the_model_before_the_interface(tmp_path: Path) -> None:
    defaults = advise(
        tmp_path, temperature=0.1, top_k=1, repetition_penalty=1.25, do_sample=True, eos_token_id=[1, 2]
    )

    async def work(endpoint: str) -> None:
        async with gateway(endpoint, says("ok"), defaults=defaults) as g:
            await g.completion()
            await g.chat(temperature=2, repetition_penalty=1)
            await g.completion(top_k=0, top_p=0.5, min_p=0.25)
            drawn = [
                (s.sampling.temperature, s.sampling.top_k, s.sampling.top_p, s.sampling.min_p, s.sampling.repetition)
                for s in g.control.submits
            ]
            assert drawn == [(0.1, 1, 1.0, 0.0, 1.25), (2.0, 1, 1.0, 0.0, 1.0), (0.1, 0, 0.5, 0.25, 1.25)]
            (card,) = (await g.http.get("/v1/models")).json()["data"]
            assert card["default_sampling"] == {
                "temperature": 0.1,
                "top_p": 1.0,
                "top_k": 1,
                "min_p": 0.0,
                "repetition_penalty": 1.25,
            }

    drive(work, tmp_path)


def test_without_a_file_the_interfaces_defaults_hold(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"temperature": "0.5"}, {"top_k": 1.5}, {"top_k": True}, {"repetition_penalty": 0}],
)
def test_advice_that_no_request_could_give_is_left_out_and_told(tmp_path: Path, values: dict[str, object]) -> None:
    with structlog.testing.capture_logs() as logs:
        assert advise(tmp_path, **values, top_p=0.5, min_p=None) == SamplingDefaults(top_p=0.5)
    assert [entry["field"] for entry in logs] == list(values)


def test_a_broken_file_is_told_and_left_aside(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with structlog.testing.capture_logs() as logs:
        assert read_defaults(tmp_path) == SamplingDefaults()
    assert len(logs) == 1
