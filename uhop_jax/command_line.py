"""What `retrieve.py` and other scripts share: flags, clear errors and exit codes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags


def run_script(
    run: Callable[[ConfigDict, Path], None], *, config: str, workdir: str
) -> None:
    """Parses `--config`, `--config.KEY=VALUE` and `--workdir`, then calls `run`.

    Whatever is wrong in flags, config or input (a `ValueError`, or a file that cannot
    be read or written) ends with exit status 2 and one sentence on standard error;
    Ctrl-C ends with 130.

    Args:
      run: called with the locked config and the working directory.
      config: default of `--config`, `FILE.py` or `FILE.py:VARIANT`.
      workdir: default of `--workdir`.
    """
    values = flags.FLAGS
    try:  # a misspelt key fails here, where the config's own flags are made
        config_flags.DEFINE_config_file(
            "config", config, "Config, as FILE.py:VARIANT.", lock_config=True
        )
    except (AttributeError, KeyError) as error:
        _refuse("unknown config key: ", error)
    flags.DEFINE_string("workdir", workdir, "Directory that the results go to.")

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
        logging.set_verbosity(logging.WARNING)
        try:
            run(values.config, Path(values.workdir))
        except (ValueError, OSError) as error:
            _refuse("", error)
        except KeyboardInterrupt:
            print("\nstopped; what is finished is kept", file=sys.stderr)
            sys.exit(130)

    app.run(main, flags_parser=parse)


def start_distributed() -> None:
    """Joins the processes of a run: `jax.distributed`, before any device is used.

    Clusters that JAX knows (TPU pods, Slurm, Open MPI, Kubernetes) need nothing more.
    Elsewhere each process says where it belongs, in three environment variables:
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
    message = str(error)
    if "Traceback" in message:  # of an error in the config file itself: its last line
        message = message.strip().splitlines()[-1].partition(": ")[2]
    if message[:1] in ("'", '"') and message[-1:] == message[:1]:  # of a KeyError
        message = message[1:-1].replace("\\n", " ").replace("\\'", "'")
    message = " ".join(message.split()) or type(error).__name__
    print(f"{Path(sys.argv[0]).name}: {prefix}{message}", file=sys.stderr)
    sys.exit(2)
