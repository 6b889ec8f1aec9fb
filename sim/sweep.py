"""Run many cases in parallel processes, with results in the order of the arguments.

A swept function is importable by name and takes one picklable argument. Its exceptions are raised here with a
note that names the argument.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    function: Callable[[A], R],
    arguments: Sequence[A],
    *,
    processes: int | None = None,
    on_result: Callable[[A, R], None] | None = None,
) -> list[R]:
    """Return `[function(a) for a in arguments]`, run in parallel; `on_result` is called as each ends."""
    count = min(processes or cores(), max(1, len(arguments)))
    if count == 1:
        return [_told(function, argument, on_result) for argument in arguments]
    results: dict[int, R] = {}
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function, argument): i for i, argument in enumerate(arguments)}
        try:
            for future in as_completed(futures):
                index = futures[future]
                results[index] = _result(future.result, arguments[index])
                if on_result is not None:
                    on_result(arguments[index], results[index])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(arguments))]


def _told(function: Callable[[A], R], argument: A, on_result: Callable[[A, R], None] | None) -> R:
    result = _result(lambda: function(argument), argument)
    if on_result is not None:
        on_result(argument, result)
    return result


def _result(get: Callable[[], R], argument: object) -> R:
    try:
        return get()
    except Exception as error:
        error.add_note(f"while running {argument}")
        raise
