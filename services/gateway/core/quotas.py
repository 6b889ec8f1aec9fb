"""Limits per API key: concurrent requests, requests per minute, tokens per minute. Pure. Rates are token
buckets that hold one minute's worth. Tokens are deducted when an answer ends, so a bucket can go negative;
the key then waits until it has refilled to one. Each gateway counts by itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import Overloaded

_MINUTE_S = 60.0


class RateLimited(Overloaded):
    """The key has reached its quota."""

    code = "rate_limit_exceeded"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None: unlimited."""

    max_concurrent: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


UNLIMITED = Quota()


class Bucket:
    """Token bucket that fills at a steady rate, up to one minute's worth."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._filled_s = now_s

    def fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._filled_s)
        self.level = min(self.per_minute, self.level + passed_s * self.per_minute / _MINUTE_S)
        self._filled_s = max(now_s, self._filled_s)

    def wait_s(self) -> float:
        """Return the seconds until the level reaches 1, or the bucket's size if smaller."""
        return max(0.0, min(1.0, self.per_minute) - self.level) * _MINUTE_S / self.per_minute


@dataclass(slots=True)
class _Account:
    quota: Quota
    active: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Quotas:
    """Quotas and usage of all keys, by digest."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = dict(quotas)
        self._accounts: dict[str, _Account] = {}

    def replace(self, quotas: Mapping[str, Quota]) -> None:
        """Replace the quotas; a key whose quota is unchanged keeps its usage."""
        self._quotas = dict(quotas)
        for key, account in list(self._accounts.items()):
            quota = self._quotas.get(key)
            if quota is None and not account.active:
                del self._accounts[key]
            elif quota is not None and quota != account.quota:
                self._accounts[key] = _Account(quota, account.active)

    def begin(self, key: str, now_s: float) -> None:
        """Count a request. Raises RateLimited, with the time to wait, and then counts nothing."""
        account = self._account(key, now_s)
        quota = account.quota
        if quota.max_concurrent is not None and account.active >= quota.max_concurrent:
            text = f"{account.active} requests with this key are being answered, and no more may be at once"
            raise RateLimited(text, retry_after_s=1.0)
        for bucket, what in ((account.tokens, "tokens"), (account.requests, "requests")):
            if bucket is not None and (wait_s := bucket.wait_s()):
                text = f"this key has used up its {bucket.per_minute:g} {what} per minute"
                raise RateLimited(text, retry_after_s=wait_s)
        if account.requests is not None:
            account.requests.level -= 1
        account.active += 1

    def end(self, key: str, tokens: int, now_s: float) -> None:
        """Count the end of a request; it may have begun before any key had a quota."""
        account = self._account(key, now_s)
        account.active = max(0, account.active - 1)
        if account.tokens is not None:
            account.tokens.level -= tokens
        if not account.active and key not in self._quotas:
            del self._accounts[key]

    def active(self, key: str) -> int:
        return self._accounts[key].active if key in self._accounts else 0

    def _account(self, key: str, now_s: float) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(self._quotas.get(key, UNLIMITED))
        quota = account.quota
        if quota.requests_per_minute is not None:
            account.requests = account.requests or Bucket(quota.requests_per_minute, now_s)
            account.requests.fill(now_s)
        if quota.tokens_per_minute is not None:
            account.tokens = account.tokens or Bucket(quota.tokens_per_minute, now_s)
            account.tokens.fill(now_s)
        return account
