"""One Redis user per sandbox, with the rights that `keys.py` computes.

The password is handed to the sandbox once and never stored; its SHA-256 is, since Redis forgets its users when it restarts
without an ACL file, and `restore` must be able to bring this one back.
"""

from __future__ import annotations

import hashlib
import secrets

from redis import exceptions as redis_errors

from sandbox_queue import keys
from sandbox_queue.errors import BrokerDenied
from sandbox_queue.wire import Wire


async def grant(wire: Wire, sandbox: str) -> str:
    """Create the sandbox's user, or give it a new password; returns the password.

    Raises:
        BrokerDenied: our own user may not manage users.
    """
    password = secrets.token_urlsafe(32)
    digest = hashlib.sha256(password.encode()).hexdigest()
    await _set_user(wire, sandbox, digest)
    return password


async def restore(wire: Wire, sandbox: str) -> bool:
    """Bring the user back after a restart of Redis, with the password it had; False where none was granted."""
    digest = await wire.one("GET", keys.ACL.of(sandbox))
    if digest is None:
        return False
    await _set_user(wire, sandbox, digest.decode())
    return True


async def revoke(wire: Wire, sandbox: str) -> None:
    """Delete the user, which also closes its connections."""
    try:
        await wire.one("ACL", "DELUSER", keys.acl_user(sandbox))
    except redis_errors.NoPermissionError as error:
        raise BrokerDenied(f"cannot delete the user of sandbox {sandbox} ({error}): grant +acl|deluser") from error
    await wire.one("DEL", keys.ACL.of(sandbox))


async def _set_user(wire: Wire, sandbox: str, digest: str) -> None:
    try:
        await wire.transaction(
            ("ACL", "SETUSER", keys.acl_user(sandbox), *keys.acl_rules(sandbox, digest)),
            ("SET", keys.ACL.of(sandbox), digest, "EX", round(keys.ACL.ttl or 0)),
        )
    except redis_errors.NoPermissionError as error:
        raise BrokerDenied(f"cannot create the user of sandbox {sandbox} ({error}): grant +acl|setuser +acl|deluser") from error
