"""Settings of the service and the launcher, from the environment.

Each field says its unit, its default and the reason for it; `docs/settings.md` is made from this file. The worker does not
read these (it starts inside every sandbox, and pydantic alone would double its start-up): it gets what it needs from the
launcher.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from sandbox_queue import limits
from sandbox_queue.errors import InvalidSettings

PREFIX = "SANDBOX_QUEUE_"


def _well_known(name: str) -> AliasChoices:
    """Our own prefix first, then the name that the rest of the world uses."""
    return AliasChoices(PREFIX + name, name)


class Settings(BaseSettings):
    """`Settings()` reads the environment; `load()` does so with errors that name the variable."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        env_ignore_empty=True,
    )

    redis_url: SecretStr | None = Field(default=None, validation_alias=_well_known("REDIS_URL"))
    """The broker: `redis://[user:password@]host:port/db`, `rediss://…` for TLS, or `unix://[user:password@]/path`.
    Default: none, and then a private server is started for this process, because the first five minutes should need
    nothing installed."""

    redis_ca_file: str | None = None
    """PEM file with the authorities that may have signed the broker's certificate (`rediss://`). Default: the system's."""

    redis_cert_file: str | None = None
    """PEM file with our client certificate (`rediss://`). Default: none, since few servers ask for one."""

    redis_key_file: str | None = None
    """PEM file with the key of `redis_cert_file`. Default: none."""

    connect_timeout: float = Field(default=5.0, gt=0, le=300)
    """Seconds to wait for the broker to accept a connection. Default 5: longer than a TCP retry, shorter than patience."""

    outage_patience: float = Field(default=60.0, gt=0)
    """Seconds for which a waiting caller goes on while the broker cannot be reached, before it gets
    `BrokerUnavailable`. Default 60: a restart or a failover passes unnoticed, a wrong address does not hang for ever."""

    sandbox_type: Literal["kubernetes", "docker", "inprocess"] | None = Field(
        default=None, validation_alias=_well_known("SANDBOX_TYPE")
    )
    """The backend: `kubernetes`, `docker` or `inprocess`. Default: none, and then it is detected, because the same code
    should run on a laptop and in a cluster."""

    docker_host: str | None = Field(default=None, validation_alias=_well_known("DOCKER_HOST"))
    """Address of the Docker engine, as the docker CLI understands it. Default: none, and then `/var/run/docker.sock`."""

    kubernetes_service_host: str | None = Field(default=None, validation_alias=_well_known("KUBERNETES_SERVICE_HOST"))
    """Set by Kubernetes in every pod; its presence means that we run in a cluster. Default: none."""

    result_ttl: float = Field(default=limits.RESULT_TTL, gt=0, le=limits.CONTROL_TTL)
    """Seconds for which a result is kept. Default 3600, as in arq: results hold file contents, and Redis is memory."""

    @field_validator("redis_url")
    @classmethod
    def _has_a_scheme(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not re.match(r"(rediss?|unix)://", url.get_secret_value()):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return url

    @field_validator("sandbox_type", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


def load(**overrides: object) -> Settings:
    """Read the environment; `overrides` are fields by name.

    Raises:
        InvalidSettings: names the variable, its problem and what to set.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]  # pydantic validates what we pass
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        known = name.removeprefix(PREFIX)
        names = {n.upper() for n in os.environ}
        if name.startswith(PREFIX) and name not in names and known in names:
            name = known
        variable = name if name.isupper() else f"{PREFIX}{name.upper()}"
        raise InvalidSettings(variable, first["msg"].removeprefix("Value error, "), "see docs/settings.md") from None
