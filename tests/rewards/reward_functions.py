"""Rewards a careless user could write; the tests import them inside workers by name."""

import os
import signal
import sys
import time
from pathlib import Path

NOT_A_FUNCTION = 3


def square(number):
    return number * number


def misbehave(what, argument=None):
    """One entry for every way an item can end."""
    if what == "echo":
        return argument
    if what == "hang":
        time.sleep(1000)
    if what == "nap":
        time.sleep(argument)
        return argument
    if what == "hold_the_lock":
        return len(str(10 ** (10**10)))
    if what == "bomb":
        return len(bytearray(argument))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(3)
    if what == "raise":
        raise EOFError("nothing left to read")
    if what == "unpicklable":
        return lambda: 0
    if what == "print":
        print("noise on standard output")
        return argument
    if what == "grandchild":
        return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    if what == "append":
        argument.append(what)
        return argument
    if what == "pid":
        return os.getpid()
    if what == "environment":
        return {"stdin": os.readlink("/proc/self/fd/0"), "torch": "torch" in sys.modules}
    if what == "sleep_marked":
        Path(argument).write_text(str(os.getpid()))
        time.sleep(1000)
    return None


def length_reward(response, answer, problem):
    if response == "hang":
        time.sleep(1000)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1.0"
    if response == "raise":
        raise KeyError("no such thing")
    return len(response) / 10 + (problem.meta["bonus"] if answer == "bonus" else 0)


def prompt_reward(response, answer, problem):
    return float(len(problem.prompt))


def true_reward(response, answer, problem):
    return response == answer


def torch_is_loaded(response, answer, problem):
    return "torch" in sys.modules


def two_arguments(response, answer):
    return 0.0


def always_right_factory():
    return lambda answer, response: (1.0, "ok")


def record_call(path, number, what):
    """`misbehave`, noted down in a file whenever it is begun."""
    with open(path, "a") as file:
        file.write(f"{number}\n")
    return misbehave(what, number)


def characters(response, answer, problem):
    return len(response)
