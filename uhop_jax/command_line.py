"""What `retrieve.py` and other scripts share: flags, clear errors and exit codes."""

import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags


def run_script(
    run: Callable[[ConfigDict, Path], None], *, config: str, workdir: str
) -> None:
    """Parses `--config`, `--config.KEY=VALUE` and `--workdir`, then calls `run`.

    Whatever is wrong in flags, config or input (a `ValueError` or a missing file) ends
    with exit status 2, one sentence on standard error and no file touched; Ctrl-C with
    130.

    Args:
      run: called with the locked config and the working directory.
      config: default of `--config`, `FILE.py` or `FILE.py:VARIANT`.
      workdir: default of `--workdir`.
    """
    values = flags.FLAGS
    config_flags.DEFINE_config_file(
        "config", config, "Config, as FILE.py:VARIANT.", lock_config=True
    )
    flags.DEFINE_string("workdir", workdir, "Directory that the results go to.")

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = values(argv)
        except SystemExit:  # --help
            raise
        except Exception as error:  # whatever a config file raises while it loads
            _refuse(error)
        if len(rest) > 1:
            _refuse(ValueError(f"unexpected argument {rest[1]!r}; flags begin with --"))
        return rest

    def main(argv: list[str]) -> None:
        del argv
        logging.set_verbosity(logging.WARNING)
        try:
            run(values.config, Path(values.workdir))
        except (ValueError, FileNotFoundError) as error:
            _refuse(error)
        except KeyboardInterrupt:
            print("\nstopped; what is finished is kept", file=sys.stderr)
            sys.exit(130)

    app.run(main, flags_parser=parse)


def _refuse(error: Exception) -> None:
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)
