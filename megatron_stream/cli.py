"""The one entry point: `megatron-stream COMMAND`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_stream import __version__
from megatron_stream.errors import MISTAKE, RunError, UserError

if TYPE_CHECKING:
    from megatron_stream.config import RunConfig

_RL_EPILOG = """\
examples:
  megatron-stream rl experiment=demo                      the demo: SmolLM2-135M, 8 steps
  megatron-stream rl experiment=demo trainer.steps=20 dir=runs/mine
  megatron-stream rl --cfg experiment=demo                print the configuration and stop
  megatron-stream rl experiment=demo dir=runs/mine resume=true
"""

_SERVE_EPILOG = """\
example (the trainer connects to the control port, the actor to engine.port):
  megatron-stream serve experiment=demo dir=runs/x engine.port=8000 --control-port 8001
"""
_ACT_EPILOG = """\
example:
  megatron-stream act experiment=demo dir=runs/x --engine-url http://127.0.0.1:8000
"""
_TRAIN_EPILOG = """\
example (one process a pipeline stage):
  torchrun --nproc-per-node=2 -m megatron_stream.cli train-rl experiment=demo dir=runs/x --engine tcp://127.0.0.1:8001
"""


_EXACT_EPILOG = """\
Trains small models 20 steps (--quick: 10) in up to four processes, by stock Megatron-core and by ours, and
compares all weights, optimizer states, norms and skipped steps. Exit code 1 when anything differs.

examples:
  megatron-stream check exact --quick
  megatron-stream check exact --only "pp2 vp2" --json exact.json
"""


_STEP_EPILOG = """\
Trains one model in one gloo process a rank, stepped in turns by stock Megatron-core, by us after the norm is known
(barrier) and before (optimistic), each with and without sending the new weights to another process.

examples:
  megatron-stream bench step                        two stages
  megatron-stream bench step --pp 4 --json step.json
  megatron-stream bench step --pp 2 --vp 2 --quick
"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "megatron-stream",
        description="RL training whose weights stream, stage by stage, into the running inference engine.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    rl = commands.add_parser(
        "rl", help="run trainer, engine and actor on this machine", epilog=_RL_EPILOG, formatter_class=raw
    )
    rl.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")

    serve = commands.add_parser(
        "serve",
        help="one engine: vLLM's server that receives weights while it runs",
        epilog=_SERVE_EPILOG,
        formatter_class=raw,
    )
    serve.add_argument("--control-port", type=int, default=0, help="where the trainer connects (0: a free port)")

    act = commands.add_parser(
        "act",
        help="the actor: rollouts and rewards into the sample stream",
        epilog=_ACT_EPILOG,
        formatter_class=raw,
    )
    act.add_argument("--engine-url", action="append", required=True, help="http://host:port; repeat for several")

    train = commands.add_parser(
        "train-rl", help="one trainer rank; start it with torchrun", epilog=_TRAIN_EPILOG, formatter_class=raw
    )
    train.add_argument("--engine", action="append", required=True, help="tcp://host:port of an engine's control")

    for command in (rl, serve, act, train):
        command.add_argument("--config", type=Path, help="a run's config.yaml instead of configs/rl.yaml")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="configuration overrides")

    check = commands.add_parser("check", help="prove a claim on this machine").add_subparsers(
        dest="check", required=True, metavar="CLAIM"
    )
    exact = check.add_parser(
        "exact",
        help="per-stage stepping against stock Megatron-core, bit by bit",
        epilog=_EXACT_EPILOG,
        formatter_class=raw,
    )
    exact.add_argument("--quick", action="store_true", help="every axis once instead of the full grid")
    exact.add_argument("--only", metavar="TEXT", default="", help="the cases whose name has TEXT in it")
    exact.add_argument("--json", metavar="FILE", type=Path, help="write the results there, too")

    bench = commands.add_parser("bench", help="measure a claim on this machine").add_subparsers(
        dest="bench", required=True, metavar="CLAIM"
    )
    step = bench.add_parser(
        "step",
        help="exposed time and step time of per-stage stepping against stock Megatron-core",
        epilog=_STEP_EPILOG,
        formatter_class=raw,
    )
    for name, default, what in (
        ("pp", 2, "pipeline stages"),
        ("vp", 1, "model chunks of each stage"),
        ("tp", 1, "tensor-parallel ranks"),
        ("dp", 1, "data-parallel ranks"),
        ("microbatches", 8, "microbatches of a step"),
        ("length", 128, "tokens of each of a microbatch's two sequences"),
        ("layers", 8, "layers of the model"),
        ("hidden", 256, "hidden size of the model"),
        ("rounds", 5, "turns of each contestant"),
        ("steps", 5, "measured steps of a turn"),
    ):
        step.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    step.add_argument("--quick", action="store_true", help="two rounds of two steps")
    step.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")

    model = commands.add_parser("model", help="make or check a model folder and print its path")
    model.add_argument("name", help="smollm2-135m-instruct, tiny, tiny-untied, or a Hugging Face folder")
    return parser


def _load(arguments: argparse.Namespace) -> RunConfig:
    from megatron_stream.config import load_config, load_config_file

    if arguments.config:
        return load_config_file(arguments.config, arguments.overrides)
    return load_config("rl", arguments.overrides)


def _rl(arguments: argparse.Namespace) -> None:
    config = _load(arguments)
    if arguments.cfg:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
        return
    from megatron_stream.launch.supervisor import Supervisor
    from megatron_stream.model.hf import read_spec
    from megatron_stream.model.prepare import resolve_model
    from megatron_stream.model.split import check_engine_stages, stage_layers

    config.model.path = str(resolve_model(config.model.path))
    config.dir = str(Path(config.dir).absolute())
    spec = read_spec(Path(config.model.path))
    stage_layers(spec, config.trainer.pipeline_parallel, 0)
    check_engine_stages(spec, config.engine.pipeline_parallel)
    Supervisor(config).run()


def _serve(arguments: argparse.Namespace) -> None:
    from megatron_stream.engine.server import serve
    from megatron_stream.engine.settings import EngineSettings
    from megatron_stream.launch.ports import choose_ports
    from megatron_stream.model.hf import read_spec
    from megatron_stream.model.prepare import resolve_model
    from megatron_stream.model.split import check_engine_stages

    config = _load(arguments)
    model = resolve_model(config.model.path)
    check_engine_stages(read_spec(model), config.engine.pipeline_parallel)
    host = config.engine.host
    ports = choose_ports({"engine.port": (host, config.engine.port), "--control-port": (host, arguments.control_port)})
    config.engine.port = ports["engine.port"]
    settings = EngineSettings(
        run_dir=config.dir,
        host=host,
        control_port=ports["--control-port"],
        deadline_s=config.stream.deadline_s,
    )
    print(f"engine http://{host}:{config.engine.port} control {settings.control_address}", flush=True)
    serve(config.engine, model, settings)


def _act(arguments: argparse.Namespace) -> None:
    from megatron_stream.model.prepare import resolve_model
    from megatron_stream.rl.actor import run_actor

    config = _load(arguments)
    config.model.path = str(resolve_model(config.model.path))

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_actor(config, arguments.engine_url, Path(config.dir), stop)

    asyncio.run(run())


def _train_rl(arguments: argparse.Namespace) -> None:
    from megatron_stream.model.prepare import resolve_model
    from megatron_stream.train.rl import train_rl

    config = _load(arguments)
    if "RANK" not in os.environ:
        raise UserError("train-rl is one rank of several: start it with torchrun --nproc-per-node=RANKS -m ...")
    train_rl(config, resolve_model(config.model.path), arguments.engine)


def _check(arguments: argparse.Namespace) -> None:
    from megatron_stream.check.exact_case import full_grid, quick_grid
    from megatron_stream.check.exact_report import run_exact

    cases = [case for case in (quick_grid() if arguments.quick else full_grid()) if arguments.only in case.name]
    if not cases:
        raise UserError(f"--only {arguments.only!r} names no case; try 'pp2', 'vp2', 'moe' or 'clip inf'")
    _check_report(arguments.json)
    run_exact(cases, arguments.json)


def _check_report(path: Path | None) -> None:
    """Before the work, not after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UserError(f"--json {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UserError(f"--json {path} is a folder; name a file in it")


def _bench(arguments: argparse.Namespace) -> None:
    from megatron_stream.bench.step import step_plan
    from megatron_stream.bench.step_report import run_step

    _check_report(arguments.json)
    run_step(step_plan(arguments), arguments.json)


def _model(arguments: argparse.Namespace) -> None:
    from megatron_stream.model.prepare import resolve_model

    print(resolve_model(arguments.name))


_COMMANDS = {
    "rl": _rl,
    "serve": _serve,
    "act": _act,
    "train-rl": _train_rl,
    "check": _check,
    "bench": _bench,
    "model": _model,
}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may also follow options: argparse alone takes only those before the first option."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest):
        return parser.parse_args(argv)  # says what is wrong
    arguments.overrides += rest
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run a command. A user's mistake is one line and exit code 2; a part that died is exit code 1."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        _COMMANDS[arguments.command](arguments)
    except UserError as error:
        print(f"{MISTAKE}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except RunError as error:
        print(f"megatron-stream: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
