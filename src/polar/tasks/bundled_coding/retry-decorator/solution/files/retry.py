import asyncio
import functools
import inspect
import time


def retry(attempts=3, *, on=(Exception,), delay=0.1, factor=2.0, longest=60.0, jitter=None, sleep=None, should_retry=None, on_retry=None):
    if callable(attempts):
        return retry()(attempts)
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, not {attempts}")

    def waits():
        """Takes an attempt's number and error, gives the seconds to sleep; None: raise it."""
        normal = delay

        def wait(attempt, error):
            nonlocal normal
            if attempt == attempts or (should_retry is not None and not should_retry(error)):
                return None
            seconds = min(normal, longest)
            normal *= factor
            after = getattr(error, "retry_after", None)
            if isinstance(after, (int, float)):
                seconds = after
            elif jitter is not None:
                seconds = jitter(seconds)
            if on_retry is not None:
                on_retry(attempt, error, seconds)
            return seconds

        return wait

    def decorate(function):
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def again(*args, **kwargs):
                wait, attempt = waits(), 1
                while True:
                    try:
                        return await function(*args, **kwargs)
                    except on as error:
                        seconds = wait(attempt, error)
                        if seconds is None:
                            raise
                    await (sleep or asyncio.sleep)(seconds)
                    attempt += 1

        else:

            @functools.wraps(function)
            def again(*args, **kwargs):
                wait, attempt = waits(), 1
                while True:
                    try:
                        return function(*args, **kwargs)
                    except on as error:
                        seconds = wait(attempt, error)
                        if seconds is None:
                            raise
                    (sleep or time.sleep)(seconds)
                    attempt += 1

        return again

    return decorate
