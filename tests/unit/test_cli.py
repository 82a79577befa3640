"""A user's mistake is one line that says what to do, and exit code 2; nothing is left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from megatron_stream.cli import main
from megatron_stream.config import CONFIG_DIR, load_config
from megatron_stream.errors import UserError
from megatron_stream.model.tiny import tiny_spec, write_tiny_model

pytestmark = pytest.mark.unit


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["rl", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("megatron-stream: error: ") and len(error.splitlines()) == 1
    return error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tiny_spec(tied=True))
    return folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.optimzer.lr=1", "unknown configuration key trainer.optimzer.lr; did you mean trainer.optimizer.lr?"),
        ("trainer.steps=many", "trainer.steps=many must be a whole number"),
        ("experiment=dmo", "no configuration experiment/dmo; available:"),
        ("trainer.micro_batch_size=5", "4 groups x 8 samples = 32, which trainer.micro_batch_size=5 does not divide"),
        ("actor.group_size=1", "use 2 or more"),
        ("trainer.optimizer.stepping=fast", "choose one of optimistic, barrier"),
        ("stream.lane=tcp", "choose one of nixl"),
        ("engine.max_model_len=8", "engine.max_model_len=8"),
    ],
)
def test_a_wrong_configuration(capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    assert message in fails(capsys, "experiment=demo", override, "--cfg")


def test_a_model_folder_that_lacks_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", tiny_spec(tied=True, num_layers=2))
    (tmp_path / "m" / "model.safetensors").unlink()
    run_dir = tmp_path / "run"
    error = fails(capsys, "experiment=demo", f"model.path={tmp_path / 'm'}", f"dir={run_dir}")
    assert "model.safetensors" in error and not run_dir.exists()


def test_a_family_that_is_not_supported(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = fails(capsys, "experiment=demo", f"model.path={tmp_path}", f"dir={tmp_path / 'run'}")
    assert "MambaForCausalLM is not supported; supported: LlamaForCausalLM" in error


@pytest.mark.parametrize(("stages", "message"), [(8, "more stages than the model's 4 layers"), (3, "do not divide")])
def test_stages_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, stages: int, message: str
) -> None:
    overrides = (f"model.path={model}", f"trainer.pipeline_parallel={stages}", f"dir={tmp_path / 'run'}")
    assert message in fails(capsys, "experiment=demo", *overrides)
    assert not (tmp_path / "run").exists()


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        overrides = (f"model.path={model}", f"engine.port={port}", f"dir={tmp_path / 'run'}")
        assert f"engine.port={port} is in use" in fails(capsys, "experiment=demo", *overrides)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    error = fails(capsys, "experiment=demo", f"model.path={model}", f"dir={tmp_path}")
    assert "resume=true" in error


@pytest.mark.parametrize("experiment", sorted(p.stem for p in (CONFIG_DIR / "experiment").glob("*.yaml")))
def test_every_experiment_loads(experiment: str) -> None:
    assert load_config("rl", [f"experiment={experiment}"]).trainer.steps > 0


def test_train_rl_without_a_launcher_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train-rl", "--engine", "tcp://127.0.0.1:1", "experiment=demo"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_rules_name_the_key() -> None:
    with pytest.raises(UserError, match=r"trainer\.steps=0 must be at least 1"):
        load_config("rl", ["experiment=demo", "trainer.steps=0"])


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20"])
def test_sampling_from_a_part_of_the_vocabulary_is_refused(cut: str) -> None:
    with pytest.raises(UserError, match="over the whole vocabulary"):
        load_config("rl", ["experiment=demo", f"actor.sampling.{cut}"])


def test_a_number_that_is_no_port() -> None:
    with pytest.raises(UserError, match=r"engine\.port=70000 is not a port"):
        load_config("rl", ["experiment=demo", "engine.port=70000"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("demo", "'demo' is not key=value; did you mean experiment=demo?"),
        ("trainer.steps=abc", "trainer.steps=abc must be a whole number"),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr=fast must be a number"),
        ("resume=maybe", "resume=maybe must be true or false"),
    ],
)
def test_a_broken_override(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("rl", ["experiment=demo", override])
    assert message in str(error.value)


def test_more_engine_stages_than_layers(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    error = fails(
        capsys, "experiment=demo", f"model.path={model}", "engine.pipeline_parallel=9", f"dir={tmp_path / 'r'}"
    )
    assert "engine.pipeline_parallel=9 is more stages than the model's 4 layers" in error
    assert main(["serve", "experiment=demo", f"model.path={model}", "engine.pipeline_parallel=9"]) == 2
    assert "engine.pipeline_parallel=9 is more stages than the model's 4 layers" in capsys.readouterr().err


def test_overrides_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "experiment=demo", "--cfg", "trainer.steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["rl", "experiment=demo", "--cgf", "trainer.steps=3"])
    assert end.value.code == 2 and "--cgf" in capsys.readouterr().err
