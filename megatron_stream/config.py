"""Structured configuration of a run: the fields, their defaults and every cross-field rule.

The files under `configs/` fill these dataclasses through hydra; `load_config` composes them.
An unknown key, a wrong type or a broken rule raises `UserError` before anything starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_stream.errors import UserError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


@dataclass
class ModelConfig:
    """`path` is a Hugging Face folder, or the name of a model that `model.prepare` can make."""

    path: str = MISSING


@dataclass
class TaskConfig:
    """A reasoning-gym data set: generator and verifier of the prompts.

    `dataset_config` is passed to reasoning-gym as it is; `size` prompts are drawn with `seed` and
    repeated in order when they run out. A reward that takes longer than `reward_timeout_s` scores 0.
    """

    dataset: str = MISSING
    dataset_config: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000
    seed: int = 0
    system_prompt: str = ""
    reward_timeout_s: float = 10.0


@dataclass
class SamplingConfig:
    """How the engine samples. `temperature` is also the one the trainer's log-probabilities use."""

    max_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class ActorConfig:
    """Rollouts: `group_size` completions per prompt.

    `max_groups_in_flight` is how many groups the actor keeps in the engines at once.
    """

    group_size: int = 8
    max_groups_in_flight: int = 4
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class AlgorithmConfig:
    """GRPO (arXiv 2402.03300) with the PPO clip (arXiv 1707.06347), token-level normalisation."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_std: bool = True
    groups_per_step: int = 4
    # A group whose oldest token is more than this many versions old is not trained on.
    max_lag_versions: int = 4


@dataclass
class OptimizerConfig:
    """AdamW as Megatron-core builds it. `clip_grad` 0 turns clipping off."""

    lr: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    # optimistic: step before the global norm is known, roll back if it says so (bitwise as stock); falls back to
    # barrier while more than half of the last steps are rolled back.
    # barrier: wait for the norm, as stock Megatron does.
    stepping: str = "optimistic"


@dataclass
class TrainerConfig:
    steps: int = 8
    pipeline_parallel: int = 2
    micro_batch_size: int = 4
    dtype: str = "float32"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    master_port: int = 0  # 0: a free port


@dataclass
class EngineConfig:
    """One vLLM server.

    `max_batched_tokens` bounds one batch. It must be well below what all running requests prefill together,
    or they all travel in one batch and the other pipeline stages stand idle.
    """

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free port
    pipeline_parallel: int = 2
    dtype: str = "float32"
    max_model_len: int = 512
    max_num_seqs: int = 16
    max_batched_tokens: int = 128
    kv_cache_mib: int = 256
    prefix_caching: bool = True
    start_deadline_s: float = 300.0


@dataclass
class StreamConfig:
    """Lanes from trainer to engine. Every wait of a transfer ends after `deadline_s`."""

    lane: str = "nixl"
    deadline_s: float = 60.0


@dataclass
class ObserveConfig:
    live: bool = True
    wandb_project: str = "megatron-stream"
    wandb_mode: str = "offline"  # offline, online, disabled
    pictures: bool = True  # timeline.png and curves.png, and trace.json


@dataclass
class RunConfig:
    """The whole run; `dir` receives everything it writes."""

    dir: str = MISSING
    seed: int = 1
    resume: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{key}={value} is not known; choose one of {', '.join(allowed)}")


def validate(config: RunConfig) -> None:
    """Check every rule that spans fields. Raises UserError with the arithmetic spelled out."""
    actor, algorithm, trainer = config.actor, config.algorithm, config.trainer
    for key, value in (
        ("actor.group_size", actor.group_size),
        ("actor.max_groups_in_flight", actor.max_groups_in_flight),
        ("actor.sampling.max_tokens", actor.sampling.max_tokens),
        ("algorithm.groups_per_step", algorithm.groups_per_step),
        ("trainer.steps", trainer.steps),
        ("trainer.pipeline_parallel", trainer.pipeline_parallel),
        ("trainer.micro_batch_size", trainer.micro_batch_size),
        ("engine.pipeline_parallel", config.engine.pipeline_parallel),
        ("engine.max_num_seqs", config.engine.max_num_seqs),
        ("engine.max_model_len", config.engine.max_model_len),
        ("engine.kv_cache_mib", config.engine.kv_cache_mib),
    ):
        _require(value >= 1, f"{key}={value} must be at least 1")
    for key, port in (("engine.port", config.engine.port), ("trainer.master_port", trainer.master_port)):
        _require(0 <= port <= 65_535, f"{key}={port} is not a port; choose one up to 65535, or 0 for a free one")
    _require(actor.group_size >= 2, "actor.group_size=1 gives every sample advantage 0; use 2 or more")
    _require(actor.sampling.temperature > 0, "actor.sampling.temperature must be above 0")
    for name, given, whole in (("top_p", actor.sampling.top_p, 1.0), ("top_k", actor.sampling.top_k, 0)):
        _require(
            given == whole,
            f"actor.sampling.{name}={given} cuts tokens off before sampling, so the engine's log-probabilities are not "
            f"those that the trainer computes over the whole vocabulary; set actor.sampling.{name}={whole:g} "
            "(temperature is exact)",
        )
    _require(algorithm.max_lag_versions >= 0, "algorithm.max_lag_versions must be 0 or more")
    _require(trainer.optimizer.clip_grad >= 0, "trainer.optimizer.clip_grad must be 0 (off) or more")
    _one_of("trainer.optimizer.stepping", trainer.optimizer.stepping, ("optimistic", "barrier"))
    _one_of("trainer.dtype", trainer.dtype, ("float32", "bfloat16"))
    _one_of("engine.dtype", config.engine.dtype, ("float32", "bfloat16"))
    _one_of("stream.lane", config.stream.lane, ("nixl",))
    _one_of("observe.wandb_mode", config.observe.wandb_mode, ("offline", "online", "disabled"))
    _require(
        actor.sampling.max_tokens < config.engine.max_model_len,
        f"engine.max_model_len={config.engine.max_model_len} leaves no room for a prompt beside "
        f"actor.sampling.max_tokens={actor.sampling.max_tokens}",
    )
    samples = algorithm.groups_per_step * actor.group_size
    divisors = ", ".join(str(size) for size in range(1, samples + 1) if samples % size == 0)
    _require(
        samples % trainer.micro_batch_size == 0,
        f"a step has {algorithm.groups_per_step} groups x {actor.group_size} samples = {samples}, which "
        f"trainer.micro_batch_size={trainer.micro_batch_size} does not divide; choose one of {divisors}",
    )


def _known_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for f in dataclasses.fields(cls):
        keys.append(prefix + f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            keys += _known_keys(type(default), f"{prefix}{f.name}.")
    return keys


def _explain(error: Exception) -> str:
    """One line for a hydra or omegaconf error, naming the key, and the nearest known one if it is unknown."""
    chain = [str(e) for e in (error, error.__cause__, error.__context__) if e is not None]
    text = "\n".join(chain)
    unknown = re.search(r"Could not override '([\w.]+)'|Key '([\w.]+)' (?:is )?not in", text)
    if unknown:
        wrong = unknown.group(1) or unknown.group(2)
        return f"unknown configuration key {wrong}{_hint(wrong)}"
    if bad := re.search(r"Error parsing override '([^']*)'", text):
        known = [path.stem for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml"))]
        hint = f"; did you mean experiment={bad.group(1)}?" if bad.group(1) in known else ""
        return f"{bad.group(1)!r} is not key=value{hint}"
    if wrong_type := re.search(
        r"Value (.+?)(?: of type '\w+')? (?:could not be converted to|is not a valid) (\w+)", text
    ):
        wanted = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
        where = re.search(r"full_key: ([\w.]+)", text)
        kind = wanted.get(wrong_type.group(2), wrong_type.group(2))
        return f"{where.group(1) if where else 'a key'}={wrong_type.group(1).strip(chr(39))} must be {kind}"
    if "Could not find" in text and (choice := re.search(r"Could not find '([\w./-]+)'", text)):
        available = re.search(r"Available options[^:]*:\s*([^\n]+(?:\n\s+\S+)*)", text)
        options = ", ".join(available.group(1).split()) if available else "see configs/"
        return f"there is no configuration {choice.group(1)}; available: {options}"
    key = re.search(r"full_key: ([\w.]+)", text)
    first = min((line for line in chain if "full_key" in line), default=chain[0], key=len).split("\n")[0]
    return f"{key.group(1)}: {first}" if key else first


def _hint(wrong: str) -> str:
    known = _known_keys(RunConfig)
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if not near:
        by_leaf = {k.rsplit(".", 1)[-1]: k for k in known}
        leaf = difflib.get_close_matches(wrong.rsplit(".", 1)[-1], list(by_leaf), n=1, cutoff=0.6)
        near = [by_leaf[n] for n in leaf]
    return f"; did you mean {near[0]}?" if near else "; `megatron-stream rl --cfg` prints all keys"


def load_config_file(path: Path, overrides: list[str]) -> RunConfig:
    """A run's own `config.yaml` (see `megatron_stream.launch.supervisor`), checked like any other."""
    if not path.is_file():
        raise UserError(f"--config {path}: no such file")
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(RunConfig), OmegaConf.load(path), OmegaConf.from_dotlist(overrides)
        )
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_explain(error)}") from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def load_config(name: str, overrides: list[str], config_dir: Path = CONFIG_DIR) -> RunConfig:
    """Compose `configs/<name>.yaml` with `key=value` overrides into a checked RunConfig.

    Raises UserError for an unknown key or file, a wrong type, a missing value or a broken rule.
    """
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            composed = compose(name, overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error)) from error
    assert isinstance(config, RunConfig)
    missing = sorted(OmegaConf.missing_keys(composed))
    _require(not missing, f"{', '.join(missing)} must be given, e.g. {missing[0] if missing else ''}=VALUE")
    validate(config)
    return config
