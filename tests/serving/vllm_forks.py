"""Import vLLM once and run each command, which comes as a line of JSON, in a fork of this process.

An import takes 10 s of processor time, and each of vLLM's own processes would repeat it. A line has the words of the
command, with a module or a script first, and the file for its output. The answer is the id of the process, which leads
a group of its own. At the end of the input, all groups are killed. The argument is a folder to search for plugins.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress

sys.path.append(sys.argv[1])
for name in ("entrypoints.launchers.api_server.entry", "v1.engine.core", "v1.worker.cpu_worker"):
    importlib.import_module(f"vllm.{name}")
FORK = multiprocessing.get_context("fork")


def run(words: list[str], log: str) -> None:
    """Become the command."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    # vLLM's processes are forks as well, although it spawns them on a CPU.
    multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
    sys.argv = words
    if words[0].endswith(".py"):
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    leaders: list[int] = []
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            run(*json.loads(line))
            sys.exit()
        leaders.append(pid)
        print(pid, flush=True)
    for pid in leaders:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # the interpreter takes seconds to take down all that has been imported
