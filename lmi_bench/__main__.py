"""The command `lmi-bench`, and `python -m lmi_bench`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being loaded ends it without a traceback."""
    try:
        from lmi_bench.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # EXIT_INTERRUPTED; where it is defined may not be loaded yet
    run()


if __name__ == "__main__":
    main()
