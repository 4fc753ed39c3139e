"""Runs tasks one at a time, and decides at every point where another could go on which one does.

Tasks are threads that hand one baton around, so that code runs as it is. What decides is seeded: the same seed gives
the same order. The clock stands still while anything can run.
"""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

MOST_POINTS = 200_000
"""A run of more points does not end by itself."""


class DeadlockError(AssertionError):
    """No task can go on."""


class LockHeldError(AssertionError):
    """A task copies, waits or allocates with the lock held, or takes it twice."""


class _AbandonedError(BaseException):
    """Ends a task of a run that has failed; no handler of the code under test takes it for an error of its own."""


class Order(Protocol):
    """Decides who runs."""

    def choose(self, running: "Task | None", candidates: "list[Task]") -> "Task": ...


class RandomOrder:
    """Any task at any point. How often the running one goes on, and how often each task comes, is drawn once."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._stay = self._random.choice([0.0, 0.5, 0.9])
        self._weights: dict[str, float] = {}

    def choose(self, running: "Task | None", candidates: "list[Task]") -> "Task":
        if running in candidates and self._random.random() < self._stay:
            return running
        for task in candidates:
            if task.name not in self._weights:
                self._weights[task.name] = self._random.choice([1.0, 1.0, 0.1, 0.01])
        left = self._random.random() * sum(self._weights[task.name] for task in candidates)
        for task in candidates:
            left -= self._weights[task.name]
            if left <= 0:
                return task
        return candidates[-1]


class PriorityOrder:
    """The task of the highest priority, and a few points where that of the running task falls below all others.

    After Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of
    Finding Bugs", ASPLOS 2010: a fault that needs `depth` ordered events is found in one run of n tasks and k points
    with a probability of at least 1 / (n * k ** (depth - 1)). It starves tasks for long, as `RandomOrder` never does.
    """

    def __init__(self, seed: int, *, depth: int = 4, length: int = 600) -> None:
        """`length` is about how many points a run has."""
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(length) for _ in range(depth - 1)}
        self._priority: dict[str, float] = {}
        self._lowest = 0.0
        self._point = 0

    def choose(self, running: "Task | None", candidates: "list[Task]") -> "Task":
        for task in candidates:
            if task.name not in self._priority:
                self._priority[task.name] = 1 + self._random.random()
        if self._point in self._changes and running is not None:
            self._lowest -= 1
            self._priority[running.name] = self._lowest
        self._point += 1
        return max(candidates, key=lambda task: self._priority[task.name])


class Task:
    """A thread that runs when it has the baton."""

    def __init__(self, name: str, body: Callable[[], None], index: int) -> None:
        self.name = name
        self.body = body
        self.index = index
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.ready: Callable[[], bool] | None = None
        """Whether it can go on; None if nothing keeps it."""
        self.awaited = ""
        self.deadline: float | None = None
        self.has_expired = False
        self.is_notified = False
        self.wants_idle = False
        self.has_ended = False

    def where(self) -> str:
        """The calls of the cache that it is in."""
        frame = sys._current_frames().get(self.thread.ident)
        calls = []
        while frame is not None:
            if "stage_cache" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)
            frame = frame.f_back
        return " > ".join(reversed(calls))


class Interleaving:
    """One run. `threads` is for the code under test; `add` adds the tasks of the test; `run` runs them all."""

    def __init__(self, order: Order, *, may_time_out: bool = False, keep_trace: bool = False) -> None:
        """Without `may_time_out`, a run that only goes on because a timed wait gives up has deadlocked."""
        self.threads = _SteppedThreads(self)
        self.now = 0.0
        self.num_points = 0
        self.digest = 0
        """Of who ran at every point: differs for two orders."""
        self.trace: list[str] | None = [] if keep_trace else None
        self.num_timeouts = 0
        self._order = order
        self._may_time_out = may_time_out
        self._tasks: list[Task] = []
        self._num_tasks = 0
        self._threads: list[threading.Thread] = []
        self._locks: list[SteppedCondition] = []
        self._running: Task | None = None
        self._has_begun = False
        self._failure: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()

    # Before and after ----------------------------------------------------------------------------------------------

    def add(self, name: str, body: Callable[[], None]) -> Task:
        task = Task(name, body, self._num_tasks)
        self._num_tasks += 1
        self._tasks.append(task)
        task.thread = threading.Thread(target=self._live, args=(task,), name=name, daemon=True)
        self._threads.append(task.thread)
        if self._has_begun:
            task.thread.start()
        return task

    def run(self) -> None:
        """Runs until every task has ended. Raises what the first of them raised, or `DeadlockError`."""
        self._has_begun = True
        for thread in list(self._threads):
            thread.start()
        self._hand_over(self._next(None))
        self._over.acquire()
        for thread in self._threads:
            thread.join(timeout=20)
        self._running = None
        if self._failure is not None:
            raise self._failure

    # By the running task -------------------------------------------------------------------------------------------

    def point(self, label: str) -> None:
        """Here another task may go on. Nothing happens outside of a run."""
        task = self._running
        if task is not None:
            self._pass_on(task, label)

    def copying(self, label: str) -> None:
        """A point within or beside a copy. Raises `LockHeldError` if the task holds a lock there."""
        task = self._running
        if task is not None:
            self._must_hold_nothing(task, label)
            self._pass_on(task, label)

    def wait_until(self, ready: Callable[[], bool], awaited: str, timeout: float | None = None) -> None:
        """Waits; `awaited` says for what. Raises `LockHeldError` if the task holds a lock."""
        self._must_hold_nothing(self._running, f"waiting for {awaited}")
        self.block(ready, awaited, timeout)

    def wait_until_idle(self) -> None:
        """Waits until no other task can go on. Raises `DeadlockError` if one of them is in a timed wait."""
        task = self._running
        task.wants_idle = True
        self.wait_until(lambda: False, "everybody else")
        stuck = [other for other in self._tasks if other.deadline is not None]
        if stuck:
            raise DeadlockError(self._who_waits("nothing is left to do, and a wait has not ended"))

    def block(self, ready: Callable[[], bool], awaited: str, timeout: float | None) -> None:
        """As `wait_until`, for a lock itself."""
        task = self._running
        task.ready, task.awaited = ready, awaited
        task.deadline = None if timeout is None else self.now + timeout
        task.has_expired = False
        try:
            self._pass_on(task, awaited)
        finally:
            task.ready, task.deadline = None, None

    def refuse(self, what: str) -> NoReturn:
        """Ends the run with a `LockHeldError`, which the code under test has no chance to handle."""
        self._fail(LockHeldError(what))
        raise _AbandonedError

    @property
    def running(self) -> Task | None:
        return self._running

    # Inside --------------------------------------------------------------------------------------------------------

    def _live(self, task: Task) -> None:
        task.baton.acquire()
        try:
            if self._failure is None:
                task.body()
        except _AbandonedError:
            return
        except BaseException as error:
            self._fail(error)
            return
        task.has_ended = True
        self._tasks.remove(task)
        if self._failure is not None:
            return
        if not self._tasks:
            self._over.release()
            return
        try:
            self._hand_over(self._next(None))
        except DeadlockError as error:
            self._fail(error)

    def _pass_on(self, task: Task, label: str) -> None:
        if self._failure is not None:
            raise _AbandonedError
        self.num_points += 1
        if self.trace is not None:
            self.trace.append(f"{task.name}: {label}")
        try:
            if self.num_points > MOST_POINTS:
                raise DeadlockError(self._who_waits(f"the run does not end in {MOST_POINTS} points"))
            chosen = self._next(task)
        except DeadlockError as error:
            self._fail(error)
            raise _AbandonedError from None
        self.digest = (self.digest * 1_000_003 + chosen.index + 1) & 0xFFFF_FFFF_FFFF_FFFF
        if chosen is not task:
            self._hand_over(chosen)
            task.baton.acquire()
            if self._failure is not None:
                raise _AbandonedError

    def _hand_over(self, task: Task) -> None:
        self._running = task
        task.baton.release()

    def _next(self, running: Task | None) -> Task:
        candidates = [task for task in self._tasks if task.ready is None or task.ready()]
        if candidates:
            return self._order.choose(running, candidates)
        for task in self._tasks:
            if task.wants_idle:
                task.wants_idle = False
                return task
        timed = [task for task in self._tasks if task.deadline is not None and not task.has_expired]
        if not timed or not self._may_time_out:
            raise DeadlockError(self._who_waits("no task can go on"))
        first = min(timed, key=lambda task: task.deadline)
        self.now = max(self.now, first.deadline)
        first.has_expired = True
        self.num_timeouts += 1
        return self._next(running)

    def _who_waits(self, what: str) -> str:
        lines = [f"{what}:"]
        for task in self._tasks:
            lines.append(f"  {task.name} waits for {task.awaited if task.ready else 'its turn'}, in {task.where()}")
        return "\n".join(lines)

    def _fail(self, error: BaseException) -> None:
        """Ends all tasks. They unwind beside one another; nothing that they do now counts."""
        if self._failure is not None:
            return
        running, self._failure = self._running, error
        for task in self._tasks:
            if task is not running:
                task.baton.release()
        self._over.release()

    def _must_hold_nothing(self, task: Task, label: str) -> None:
        if any(lock.owner is task for lock in self._locks):
            self.refuse(f"{task.name} holds the lock at: {label}; in {task.where()}")


class SteppedCondition:
    """Stands for `threading.Condition`. Its lock must not be taken twice, though the real one allows it."""

    def __init__(self, steps: Interleaving) -> None:
        self._steps = steps
        self._waiting: list[Task] = []
        self.owner: Task | None = None
        steps._locks.append(self)

    def __enter__(self) -> "SteppedCondition":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self) -> None:
        task = self._steps.running
        if task is None:
            return
        if self.owner is task:
            self._steps.refuse(f"{task.name} takes the lock that it holds; in {task.where()}")
        self._steps.point("acquire")
        if self.owner is not None:
            self._steps.block(lambda: self.owner is None, f"the lock, which {self.owner.name} holds", None)
        self.owner = task

    def release(self) -> None:
        task = self._steps.running
        if task is None or self._steps._failure is not None:
            return
        self.owner = None
        self._steps.point("release")

    def wait(self, timeout: float | None = None) -> bool:
        task = self._steps.running
        if self.owner is not task:
            raise RuntimeError("cannot wait on a lock that is not held")
        self.owner = None
        task.is_notified = False
        self._waiting.append(task)
        try:
            self._steps.block(
                lambda: self.owner is None and (task.is_notified or task.has_expired), "a notification", timeout
            )
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
        self.owner = task
        return task.is_notified

    def notify_all(self) -> None:
        task = self._steps.running
        if task is not None and self.owner is not task:
            raise RuntimeError("cannot notify on a lock that is not held")
        for waiting in self._waiting:
            waiting.is_notified = True
        self._waiting.clear()
        self._steps.point("notify")


class _SteppedThreads:
    """What the stage cache's controller takes as `threads`."""

    def __init__(self, steps: Interleaving) -> None:
        self._steps = steps

    def condition(self) -> SteppedCondition:
        return SteppedCondition(self._steps)

    def monotonic(self) -> float:
        return self._steps.now

    def start(self, target: Callable[[], None], name: str) -> Any:
        return _SteppedThread(self._steps, self._steps.add(name, target))


class _SteppedThread:
    def __init__(self, steps: Interleaving, task: Task) -> None:
        self._steps = steps
        self._task = task

    def join(self, timeout: float | None = None) -> None:
        steps, running = self._steps, self._steps.running
        if running is not None:
            steps.wait_until(
                lambda: self._task.has_ended or running.has_expired, f"the end of {self._task.name}", timeout
            )
