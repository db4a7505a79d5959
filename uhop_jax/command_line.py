"""Parts of both scripts: shipped configs, flags, clear errors and exit codes."""

import difflib
import importlib.util
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from uhop_jax._checks import check_choice, check_distinct
from uhop_jax._files import user_path
from uhop_jax.workdir import flattened

# Types of all documented errors, beside too little memory.
WRONG = (ValueError, OSError, OverflowError, FloatingPointError)
NO_MEMORY = "RESOURCE_EXHAUSTED"  # in errors of XLA


def configs() -> dict[str, Path]:
    """The config files that come with the package, by name.

    A wheel puts the files inside the package; a checkout has them at its top.
    """
    package = Path(__file__).parent
    places = (package / "configs", package.parent / "configs")
    directory = next(place for place in places if place.is_dir())
    return {path.stem: path for path in sorted(directory.glob("[!_]*.py"))}


def config_module(name: str) -> ModuleType:
    """A config file that comes with the package, imported.

    Raises:
      ValueError: if no config has the name.
    """
    paths = configs()
    check_choice("config", name, paths)
    spec: Any = importlib.util.spec_from_file_location(f"{name}_config", paths[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cost(name: str, variant: str) -> str:
    """The cost of a variant as shipped, in the words of the table of its config.

    The cost is "" for a variant that the table does not have.
    """
    for line in (config_module(name).__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and f"`{variant}`" in cells[1]:
            return cells[-2]
    return ""


def load_config(
    name: str, *variant: str, changes: Mapping[str, Any] | None = None
) -> ConfigDict:
    """A config as the command line makes it, for Python and notebooks.

    Args:
      name: of a file of `configs/`, such as `retrieval` or `vision`.
      *variant: name of a variant of the config; the default without a name.
      changes: new values by key, such as `{"data.name": "digits"}`.

    Returns:
      The locked config.

    Raises:
      ValueError: if the file, the variant or a key does not exist.
    """
    config = config_module(name).get_config(*variant).lock()
    try:
        config.update_from_flattened_dict(dict(changes or {}))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"config {name}: {_sentence(error)}") from None
    return config


def check_config(config: ConfigDict, *names: str) -> None:
    """Compares a config with the shipped config of the task: keys, types, lists.

    Args:
      config: may come from a user's file.
      *names: of the shipped configs to compare with; of several names, the `task` of
        the config selects one.

    Raises:
      ValueError: if a key is missing or unknown, a value or an element of a list is of
        another type, or a list names something twice.
    """
    shipped = {name: config_module(name).get_config() for name in names}
    task = config.get("task")
    like = [name for name, one in shipped.items() if one.get("task") == task]
    if not like:
        files = " or ".join(f"configs/{name}.py" for name in names)
        got = "none" if task is None else repr(task)
        raise ValueError(
            f"config.task: this script takes a config like {files}, got one of task "
            f"{got}"
        )
    (name,) = like
    module = config_module(name)
    variant = config.get("variant")
    known = shipped[name]
    if variant in module.VARIANTS:
        known = module.get_config(variant)
    before, now = flattened(known.to_dict()), flattened(config.to_dict())
    for key in sorted(now.keys() | before.keys()):
        if key not in before:
            near = difflib.get_close_matches(key, before, 1)
            hint = f"; did you mean config.{near[0]}?" if near else ""
            raise ValueError(f"unknown config key: config.{key}{hint}")
        if key not in now:
            raise ValueError(
                f"config.{key} is missing; configs/{name}.py has {before[key]!r}"
            )
        _check_value(key, now[key], before[key])


def _check_value(key: str, value: Any, shipped: Any) -> None:
    """Refuses a value of another type than the shipped value, and repeated items."""
    if not isinstance(shipped, (tuple, list)):
        if not _is_like(value, shipped):
            raise ValueError(
                f"{key} must be of type {type(shipped).__name__}, got {value!r}"
            )
        return
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{key} must be a tuple such as {shipped!r}, got {value!r}")
    for item in value if shipped else ():
        if not _is_like(item, shipped[0]):
            raise ValueError(
                f"{key} must hold values of type {type(shipped[0]).__name__}, got "
                f"{item!r}"
            )
    if key != "data.split":  # fractions, which may be equal
        check_distinct(key, value)


def _is_like(value: Any, shipped: Any) -> bool:
    """Whether a value may replace the shipped value."""
    if shipped is None:  # a placeholder, whose type the config itself keeps
        return True
    if isinstance(shipped, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(shipped)


def run_script(run: Callable[[ConfigDict, Path], None], *, config: str) -> None:
    """Parses `--config`, `--config.KEY=VALUE` and `--workdir`, then calls `run`.

    A fault of flags, config or input, a loss that diverges, too little memory, and a
    file that cannot be read or written end with exit status 2 and one sentence on
    standard error; Ctrl-C ends with 130.

    Args:
      run: called with the locked config and the working directory.
      config: name of the default config; `--config` takes `FILE.py:VARIANT`. If no
        file `configs/NAME.py` exists, the name stands for the shipped config.
    """
    _configure_output()
    values = flags.FLAGS
    shipped = configs()
    sys.argv = [_with_full_path(argument, shipped) for argument in sys.argv]
    for argument in sys.argv:
        match = re.fullmatch(r"--?config=(.+\.py)(:.*)?", argument)
        if match and not Path(match[1]).exists():
            names = ", ".join(f"configs/{name}.py" for name in shipped)
            _refuse("", f"no such config file: {match[1]}; there are {names}")
    if asked := {"--help", "-help", "--helpfull", "-h"} & set(sys.argv):
        sys.modules["__main__"].__doc__ = _help(shipped, config)
    try:  # a misspelt key fails here, where the flags of the config are made
        config_flags.DEFINE_config_file(
            "config",
            str(shipped[config]),
            "Config, as FILE.py:VARIANT.",
            lock_config=True,
        )
    except (AttributeError, KeyError) as error:
        _refuse("unknown config key: ", error)
    flags.DEFINE_string(
        "workdir",
        "",
        "Directory that the results go to; results/TASK/VARIANT if it is not given, "
        f"such as {_place(config_module(config).get_config())}.",
    )

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = values(argv)
        except (AttributeError, KeyError) as error:
            _refuse("unknown config key: ", error)
        except (flags.Error, OSError, ValueError) as error:
            _refuse("", error)
        if len(rest) > 1:
            _refuse("", f"unexpected argument {rest[1]!r}; flags begin with --")
        return rest

    def main(argv: list[str]) -> None:
        del argv
        # Orbax logs every step, and errors that are raised as well.
        logging.set_verbosity(logging.FATAL)
        try:
            run(values.config, user_path(values.workdir or _place(values.config)))
        except WRONG as error:
            _refuse("", error)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and NO_MEMORY not in str(error):
                raise
            _refuse("there is not enough memory for sizes of this config: ", error)
        except KeyboardInterrupt:
            print("\nstopped; what is finished is kept", file=sys.stderr)
            sys.exit(130)

    try:
        app.run(main, flags_parser=parse)
    except SystemExit as error:  # absl ends with 1 after its help
        sys.exit(0 if asked else error.code)


def _help(shipped: Mapping[str, Path], config: str) -> str:
    """Text of `--help`: the docstring of the chosen config, then keys and values."""
    variant: tuple[str, ...] = ()
    for argument in sys.argv:
        match = re.fullmatch(r"--?config=(.+\.py)(?::(.*))?", argument)
        names = {path.resolve(): name for name, path in shipped.items()}
        if match and (name := names.get(Path(match[1]).resolve())):
            config, variant = name, (match[2],) if match[2] else ()
    module = config_module(config)
    values = module.get_config(*variant)
    comments = _comments(shipped[config].read_text("utf-8"), values.variant)
    lines = []
    for key, value in flattened(values.to_dict()).items():
        if key in ("variant", "task"):  # set by the file and the variant
            continue
        text = shlex.quote(str(value).replace("'", '"'))
        flag = f"  --config.{key}={text}"
        lines.append(f"{flag:<46}  {comments.get(key, '')}".rstrip())
    title = f"Keys, with the values of the variant {values.variant}:"
    return "\n".join([(module.__doc__ or "").rstrip(), "", title, "", *lines])


def _comments(source: str, variant: str) -> dict[str, str]:
    """The comment of each key in a config's source; the variant's own part decides."""
    parts = re.split(r"^(?= +case \"|def )", source, flags=re.M)
    own = re.compile(rf' +case [^:]*"{variant}"|def _{variant}\(')
    common = [part for part in parts if not re.match(" +case |def _", part)]
    text = "\n".join([*parts, *common, *filter(own.match, parts)])  # the last counts
    return dict(re.findall(r"^ +config\.([\w.]+) = .*  # (.+)$", text, re.M))


def _configure_output() -> None:
    """Escapes letters that a terminal cannot show; makes a warning one line.

    Only scripts call this: a library changes nothing of the process that imports it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    script, hook = Path(sys.argv[0]).name, sys.unraisablehook
    warnings.formatwarning = lambda message, *_, **__: f"{script}: {message}\n"

    def report(unraisable: Any) -> None:
        # After a failed write, which is raised, the threads of TensorStore still
        # report to an event loop that has ended.
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = report


def _place(config: ConfigDict) -> Path:
    """The default `--workdir` of a task and variant."""
    parts = config.get("task", "retrieval"), config.get("variant", "mine")
    return Path("results", *(re.sub(r"\W", "_", str(part)) for part in parts))


def _with_full_path(argument: str, shipped: Mapping[str, Path]) -> str:
    """The argument; the path of a config is completed if it is at `~`, or shipped."""
    argument = re.sub(
        "^(--?config=)(~[^:]*)", lambda m: f"{m[1]}{user_path(m[2])}", argument
    )
    match = re.fullmatch(r"(-{1,2}config=)?configs/(\w+)\.py(:.*)?", argument)
    if match is None:
        return argument
    flag, name, variant = (part or "" for part in match.groups())
    if name not in shipped or Path("configs", f"{name}.py").exists():
        return argument
    return f"{flag}{shipped[name]}{variant}"


def start_distributed() -> None:
    """Joins the processes of a run by `jax.distributed`, before a device is used.

    Clusters that JAX knows (TPU pods, Slurm, Open MPI, Kubernetes) need nothing more.
    Elsewhere three environment variables place each process in the run:
    `JAX_COORDINATOR_ADDRESS=HOST:PORT` (of process 0), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`. On CPUs, collectives go through Gloo.

    Raises:
      ValueError: if only some of the variables are set, or they are no numbers.
    """
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    address, number, index = (os.environ.get(name, "") for name in names)
    given = [bool(x) for x in (address, number, index)]
    if not any(given):
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                f"distributed: no cluster was found ({error}); set {', '.join(names)}"
            ) from None
        return
    if not (all(given) and number.isdecimal() and index.isdecimal()):
        raise ValueError(
            f"distributed needs {', '.join(names)} all three, an address and two "
            f"numbers, got {address!r}, {number!r}, {index!r}"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(number), int(index))


def _refuse(prefix: str, error: Exception | str) -> NoReturn:
    """Ends the script with one sentence on standard error and exit status 2."""
    print(f"{Path(sys.argv[0]).name}: {prefix}{_sentence(error)}", file=sys.stderr)
    sys.exit(2)


def _sentence(error: Exception | str) -> str:
    """The message of an error, on one line."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        message = where + error.strerror
    if "Traceback" in message:  # of an error in the config file itself: its last line
        message = message.strip().splitlines()[-1].partition(": ")[2]
    if message[:1] in ("'", '"') and message[-1:] == message[:1]:  # of a KeyError
        message = message[1:-1].replace("\\n", " ").replace("\\'", "'")
    return " ".join(message.split()) or type(error).__name__
