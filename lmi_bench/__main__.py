"""The command `lmi-bench`, and `python -m lmi_bench`."""

import os
import signal
import sys
import threading


def main() -> None:
    """Run the command line; Ctrl-C while it is loaded or ends leaves no traceback."""
    try:
        try:
            from lmi_bench.cli.main import main as run
        except BaseException as exc:
            from lmi_bench.core.errors import EXIT_INTERRUPTED, is_ctrl_c

            if not is_ctrl_c(exc):
                raise
            sys.exit(EXIT_INTERRUPTED)
        sys.unraisablehook = _interrupt_again
        run()
    finally:  # Python's own end would print a KeyboardInterrupt of its last moments
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # One that left an exec(), as in the making of a dataclass, is remembered once handled, and
        # `python -m` then ends by SIGINT, not with the exit code. Another exec() is the remedy.
        exec("")  # noqa: S102


def _interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Send a Ctrl-C once more that came in a destructor, where Python ignores it."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        threading.Timer(0.01, _interrupt).start()
    else:
        sys.__unraisablehook__(ignored)


def _interrupt() -> None:
    """Send it once the main thread has left the hook above, in which Python ignores it as well."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not _interrupt_again.__code__:
        frame = frame.f_back
    if frame is not None:
        threading.Timer(0.01, _interrupt).start()
    elif signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:  # else the command has ended
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
