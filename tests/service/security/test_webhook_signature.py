"""Signatures agree with the published example of Standard Webhooks."""

from __future__ import annotations

import base64

from service.security.webhook_signature import PREFIX, SECRET_BYTES, new_secret, signature


def test_the_published_example() -> None:
    """Values of the specification's own tests (github.com/standard-webhooks/standard-webhooks)."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - published
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_secrets_are_random_and_of_full_length() -> None:
    one, other = new_secret(), new_secret()
    assert one != other
    assert one.startswith(PREFIX)
    assert len(base64.b64decode(one.removeprefix(PREFIX))) == SECRET_BYTES
