"""Start a command that outlives whoever wanted it: a session of its own, no terminal, no parent of ours.

    python -IS detaching.py FOLDER OUTPUT LOG COMMAND...

The command works in FOLDER, reads nothing, and writes to the files OUTPUT and LOG (stdout and stderr). Its process id is
printed. Standard library only: this runs in a fresh interpreter, where forking is safe however many threads the caller has.
"""

from __future__ import annotations

import os
import signal
import sys


def detach(folder: str, output: str, log: str, command: list[str]) -> int:
    """Fork; return the process id in the parent, never in the child, which becomes the command."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        for number in range(1, signal.NSIG):  # a shell may have had us ignore some
            if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        kept = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.chdir(folder)
        places = ((0, os.devnull, os.O_RDONLY), (1, output, kept), (2, log, kept))
        for target, name, flags in places:
            handle = os.open(name, flags, 0o644)
            os.dup2(handle, target)
            os.close(handle)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    print(detach(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]), flush=True)
    os._exit(0)  # the child has its own copies of what is open here
