"""Parse the command line, call one function, print what it returns."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit import __version__
from loaderkit.cache.storage import is_url
from loaderkit.errors import LoaderkitError
from loaderkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_STATUSES = """\
exit status:
  0  done, and all is well; explain: the text was read, whatever it says
  1  bad news: damaged, leaking, does not fit, a setting that does not work; or it
     could not be done, and the message says why
  2  wrong arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name; the process's own if None.

    Returns:
        The exit status, as ``--help`` lists them.
    """
    options = _parser().parse_args(argv)
    try:
        answer = options.run(options)
    except LoaderkitError as error:
        if options.json:
            parts = {"what": error.what, "why": error.why, "fix": error.fix}
            print(json.dumps({"error": type(error).__name__, **parts}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer.to_json()) if options.json else answer)
    # explain answers what it was asked also where memory ran out.
    return 0 if options.run is _explain or getattr(answer, "ok", True) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loaderkit",
        description="Data loading whose memory stays flat.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"loaderkit {__version__}"
    )
    _add_completion(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object")

    _add_pack(commands, shared)

    inspect = commands.add_parser(
        "inspect", parents=[shared], help="what is in a cache"
    )
    inspect.add_argument("cache", help="its folder, or a URL")
    _add_storage_options(inspect)
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", parents=[shared], help="hash a cache again")
    verify.add_argument("cache", help="its folder, or a URL")
    _add_storage_options(verify)
    verify.set_defaults(run=_verify)
    _add_push_and_pull(commands, shared)

    demo = commands.add_parser(
        "demo", parents=[shared], help="real molecules, end to end"
    )
    demo.add_argument("--epochs", type=_positive, default=40, help="epochs to train")
    demo.add_argument("--keep", metavar="FOLDER", help="keep the files and the cache")
    demo.set_defaults(run=_demo)
    _add_watch(commands, shared)
    _add_explain(commands, shared)
    _add_plan(commands, shared)
    doctor = commands.add_parser(
        "doctor", parents=[shared], help="machine, limits, devices, settings"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_completion(parser: argparse.ArgumentParser) -> None:
    """Offer completion for shells, which shtab writes from the parser."""
    name = "--print-completion"
    if importlib.util.find_spec("shtab") is not None:
        import shtab

        shtab.add_argument_to(parser, [name])
        return
    parser.add_argument(
        name,
        action=_MissingCompletion,
        metavar="{bash,zsh,tcsh}",
        help="print what completes commands in a shell; needs shtab",
    )


class _MissingCompletion(argparse.Action):
    """Says what completion needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("shells are completed by shtab: pip install shtab")


def _add_pack(commands: Any, shared: argparse.ArgumentParser) -> None:
    pack = commands.add_parser("pack", parents=[shared], help="make a cache")
    pack.add_argument(
        "source",
        help="a folder of .pt files, or module:name or file.py:name of a dataset",
    )
    pack.add_argument("cache", help="the cache's folder, or a URL")
    _add_storage_options(pack)
    pack.add_argument("--workers", type=int, help="processes that read samples")
    pack.add_argument("--compression", help="gzip, lzf, or a filter of hdf5plugin")
    pack.add_argument(
        "--shard-size",
        type=_size,
        default=256 << 20,
        metavar="SIZE",
        help="bytes after which a file is finished, such as 256MiB",
    )
    pack.add_argument("--pattern", default="*.pt", help="which files of the folder")
    pack.add_argument("--overwrite", action="store_true", help="replace a cache")
    pack.add_argument(
        "--unsafe-pickle", action="store_true", help="let the .pt files run code"
    )
    pack.set_defaults(run=_pack)


def _add_push_and_pull(commands: Any, shared: argparse.ArgumentParser) -> None:
    push = commands.add_parser("push", parents=[shared], help="copy a cache to a store")
    push.add_argument("cache", help="the cache's folder")
    push.add_argument("url", help="where it goes, such as s3://bucket/molecules")
    push.add_argument("--overwrite", action="store_true", help="replace a cache there")
    _add_storage_options(push)
    push.set_defaults(run=_push)

    pull = commands.add_parser(
        "pull", parents=[shared], help="copy a cache from a store"
    )
    pull.add_argument("url", help="where it is, such as s3://bucket/molecules")
    pull.add_argument("cache", help="the new cache's folder")
    _add_storage_options(pull)
    pull.set_defaults(run=_pull)


def _add_storage_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage-option",
        type=_name_and_value,
        action="append",
        metavar="NAME=VALUE",
        help="for the file system of a URL; VALUE may be JSON; may be repeated",
    )


def _add_watch(commands: Any, shared: argparse.ArgumentParser) -> None:
    watch = commands.add_parser(
        "watch", parents=[shared], help="run a script, or look at one, and judge it"
    )
    watch.add_argument("--pid", type=_positive, help="look at a running process")
    watch.add_argument("--seconds", type=float, help="how long to look at --pid")
    watch.add_argument(
        "--html", default="leak-report.html", metavar="FILE", help="page with plots"
    )
    watch.add_argument("script", nargs="?", help="a Python file")
    watch.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    watch.set_defaults(run=_watch)


def _add_explain(commands: Any, shared: argparse.ArgumentParser) -> None:
    explain = commands.add_parser(
        "explain", parents=[shared], help="why it ran out of memory, from its message"
    )
    explain.add_argument(
        "file", nargs="?", default="-", help="a text or log; standard input if -"
    )
    explain.set_defaults(run=_explain)


def _add_plan(commands: Any, shared: argparse.ArgumentParser) -> None:
    plan = commands.add_parser(
        "plan", parents=[shared], help="what batch fits, and what to change"
    )
    plan.add_argument("model", help="module:name or file.py:name of a torch module")
    plan.add_argument(
        "data",
        help="a cache, module:name or file.py:name of a dataset, or the shape of each "
        "argument for one sample, such as 80x7 or 3x32x32,20:int64",
    )
    plan.add_argument("--device", default="cpu", help="where it shall train")
    plan.add_argument("--limit", type=_size, help="such as 8GiB; what is free if none")
    plan.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        metavar="N",
        help="samples of a step",
    )
    plan.add_argument(
        "--epochs", type=_positive, default=100, metavar="N", help="it shall survive"
    )
    plan.add_argument("--optimizer", default="adam", help="such as adamw or sgd")
    plan.add_argument("--autocast", help="such as bfloat16")
    plan.add_argument("--loss", help="module:name or file.py:name of a loss")
    plan.set_defaults(run=_plan)


def _pack(options: argparse.Namespace) -> Any:
    from loaderkit.datasets.inspect import inspect_cache
    from loaderkit.datasets.pack import pack
    from loaderkit.datasets.sources import PtFolder

    source: Any
    if ":" in options.source and not Path(options.source).exists():
        source = _named(options.source)
    else:
        safe = not options.unsafe_pickle
        source = PtFolder(options.source, pattern=options.pattern, weights_only=safe)
    pack(
        source,
        options.cache,
        workers=options.workers,
        compression=options.compression,
        shard_bytes=options.shard_size,
        overwrite=options.overwrite,
        storage_options=_storage_options(options),
    )
    return inspect_cache(options.cache, storage_options=_storage_options(options))


def _inspect(options: argparse.Namespace) -> Any:
    from loaderkit.datasets.inspect import inspect_cache

    return inspect_cache(options.cache, storage_options=_storage_options(options))


def _verify(options: argparse.Namespace) -> Any:
    from loaderkit.cache.verify import verify

    return verify(options.cache, storage_options=_storage_options(options))


def _push(options: argparse.Namespace) -> Any:
    from loaderkit.cache.transfer import push

    return push(
        options.cache,
        options.url,
        storage_options=_storage_options(options),
        overwrite=options.overwrite,
    )


def _pull(options: argparse.Namespace) -> Any:
    from loaderkit.cache.transfer import pull

    return pull(options.url, options.cache, storage_options=_storage_options(options))


def _storage_options(options: argparse.Namespace) -> dict[str, Any] | None:
    """Give the options of a URL's file system; None where there are none."""
    return None if options.storage_option is None else dict(options.storage_option)


def _demo(options: argparse.Namespace) -> Any:
    from loaderkit.cli.demo import run_demo

    return run_demo(epochs=options.epochs, keep=options.keep)


def _watch(options: argparse.Namespace) -> Any:
    from loaderkit.leaks.watch_process import watch_process, watch_script

    if options.pid is not None:
        return watch_process(options.pid, seconds=options.seconds, live=_live)
    if options.script is None:
        what = "There is nothing to watch."
        raise LoaderkitError(what, fix="loaderkit watch train.py, or --pid 1234")
    found = watch_script(options.script, options.args, page=options.html, live=_live)
    _live("")
    return found


def _explain(options: argparse.Namespace) -> Any:
    from loaderkit.budget.oom import diagnose_oom

    if options.file == "-":
        return diagnose_oom(sys.stdin.read())
    try:
        return diagnose_oom(Path(options.file).read_text(errors="replace"))
    except OSError as error:
        what = f"{options.file} cannot be read: {error}."
        fix = "loaderkit explain error.txt, or python train.py 2>&1 | loaderkit explain"
        raise LoaderkitError(what, fix=fix) from error


def _plan(options: argparse.Namespace) -> Any:
    from loaderkit.budget.batch import plan_batch
    from loaderkit.budget.train_step import StepError

    model = _found(options.model)
    if isinstance(model, type) or not hasattr(model, "parameters"):
        model = model()
    try:
        return plan_batch(
            model,
            _data(options),
            options.device,
            limit=options.limit,
            batch_size=options.batch_size,
            epochs=options.epochs,
            optimizer=options.optimizer,
            autocast=options.autocast,
            loss=options.loss and _found(options.loss),
        )
    except StepError as error:  # an error of the user's own code is shown whole
        what = f"The plan cannot be made: {error}."
        fix = "loaderkit plan file.py:Model data.lk --device mps --limit 8GiB"
        raise LoaderkitError(what, fix=fix) from error


def _data(options: argparse.Namespace) -> Any:
    """Open a cache, find a dataset, or make samples of the given shapes."""
    from loaderkit.budget.samples import samples_of_shape
    from loaderkit.datasets.open import open_cache

    if re.fullmatch(r"\d+(x\d+)*(:\w+)?(,\d+(x\d+)*(:\w+)?)*", options.data):
        return samples_of_shape(options.data, options.batch_size)
    return (
        open_cache(options.data)
        if is_url(options.data) or Path(options.data).is_dir()
        else _named(options.data)
    )


def _doctor(options: argparse.Namespace) -> Any:  # noqa: ARG001
    from loaderkit.cli.doctor import examine

    return examine()


def _live(text: str) -> None:
    """Show a line that the next one replaces; nothing where nobody looks."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _named(text: str) -> Any:
    """Find a dataset by ``module:name`` or ``file.py:name``; call what makes one."""
    found = _found(text)
    made = isinstance(found, type) or not hasattr(found, "__len__")
    return found() if made and callable(found) else found


def _found(text: str) -> Any:
    """Find something by ``module:name`` or ``file.py:name``."""
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            module: Any = _run_file(Path(where))
        else:
            module = importlib.import_module(where)
        return getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        what = f"There is nothing called {text!r}: {error}."
        why = "what is in code is named module:name, or file.py:name"
        raise LoaderkitError(what, why=why, fix="check the name") from error


def _run_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _name_and_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        msg = f"must be NAME=VALUE, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        msg = f"must be at least 1, got {text}"
        raise argparse.ArgumentTypeError(msg)
    return number
