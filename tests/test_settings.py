"""Settings from the environment: names, precedence, and errors that help without telling secrets."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from sandbox_queue.address import Address
from sandbox_queue.errors import InvalidSettings
from sandbox_queue.settings import PREFIX, Settings, load

PASSWORD = "hunter2"
WELL_KNOWN = ("REDIS_URL", "SANDBOX_TYPE", "DOCKER_HOST", "KUBERNETES_SERVICE_HOST")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(PREFIX) or name.upper() in WELL_KNOWN:
            monkeypatch.delenv(name)


def url_of(settings: Settings) -> str | None:
    return settings.redis_url.get_secret_value() if settings.redis_url else None


def refused(variable: str, **overrides: Any) -> InvalidSettings:
    """Assert that the settings are refused, and that the message names the variable."""
    with pytest.raises(InvalidSettings) as caught:
        load(**overrides)
    error = caught.value
    assert error.field == variable
    assert error.problem
    assert error.remedy
    assert str(error).startswith(f"{variable}: ")
    return error


# --- names


def test_without_any_variable_everything_has_its_default() -> None:
    settings = load()
    assert url_of(settings) is None
    assert settings.sandbox_type is None
    assert (settings.connect_timeout, settings.outage_patience, settings.result_ttl) == (5.0, 60.0, 3600.0)


SAMPLES: dict[str, tuple[str, object]] = {
    "redis_ca_file": ("/ca.pem", "/ca.pem"),
    "redis_cert_file": ("/cert.pem", "/cert.pem"),
    "redis_key_file": ("/key.pem", "/key.pem"),
    "connect_timeout": ("2.5", 2.5),
    "outage_patience": ("7", 7.0),
    "result_ttl": ("60", 60.0),
    "sandbox_type": ("docker", "docker"),
    "docker_host": ("tcp://engine:2375", "tcp://engine:2375"),
    "kubernetes_service_host": ("10.0.0.1", "10.0.0.1"),
}


@pytest.mark.parametrize("field", SAMPLES)
def test_every_setting_is_read_from_the_variable_with_our_prefix(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    text, value = SAMPLES[field]
    monkeypatch.setenv(PREFIX + field.upper(), text)
    assert getattr(load(), field) == value


@pytest.mark.parametrize("field", SAMPLES)
def test_a_variable_in_lower_case_counts_too(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    text, value = SAMPLES[field]
    monkeypatch.setenv((PREFIX + field).lower(), text)
    assert getattr(load(), field) == value


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_what_the_rest_of_the_world_calls_by_a_name_is_read_under_that_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = {"REDIS_URL": "redis://well-known", "SANDBOX_TYPE": "docker"}.get(name, "somewhere")
    monkeypatch.setenv(name, text)
    settings = load()
    assert (url_of(settings) if name == "REDIS_URL" else getattr(settings, name.lower())) == text


@pytest.mark.parametrize("name", ["CONNECT_TIMEOUT", "RESULT_TTL", "REDIS_CA_FILE"])
def test_other_variables_without_our_prefix_are_not_ours(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1.25")
    assert load() == Settings()
    assert 1.25 not in load().model_dump().values()
    assert "1.25" not in load().model_dump().values()


def test_every_setting_has_a_sample_here_and_a_docstring_with_its_default() -> None:
    assert set(Settings.model_fields) == {*SAMPLES, "redis_url"}
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert "Default" in field.description, name


# --- precedence


def test_our_own_name_wins_over_the_well_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://theirs")
    monkeypatch.setenv("SANDBOX_QUEUE_REDIS_URL", "redis://ours")
    assert url_of(load()) == "redis://ours"


def test_an_argument_wins_over_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://theirs")
    monkeypatch.setenv("SANDBOX_QUEUE_REDIS_URL", "redis://ours")
    monkeypatch.setenv("SANDBOX_QUEUE_CONNECT_TIMEOUT", "3")
    settings = load(redis_url="redis://argument", connect_timeout=4)
    assert (url_of(settings), settings.connect_timeout) == ("redis://argument", 4.0)


def test_an_argument_of_none_asks_for_the_private_server_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://theirs")
    assert url_of(load(redis_url=None)) is None


@pytest.mark.parametrize("name", ["REDIS_URL", "SANDBOX_QUEUE_REDIS_URL", "SANDBOX_QUEUE_CONNECT_TIMEOUT", "SANDBOX_TYPE"])
def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compose files and charts pass on variables that nobody has set, as empty ones."""
    monkeypatch.setenv(name, "")
    assert load() == Settings.model_construct()


def test_an_empty_variable_of_ours_does_not_hide_the_well_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_QUEUE_REDIS_URL", "")
    monkeypatch.setenv("REDIS_URL", "redis://theirs")
    assert url_of(load()) == "redis://theirs"


def test_the_type_of_sandbox_may_be_written_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "Kubernetes")
    assert load().sandbox_type == "kubernetes"


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = load()
    with pytest.raises(ValidationError):
        settings.connect_timeout = 1.0


# --- errors


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_URL", "http://localhost"),
        ("SANDBOX_QUEUE_REDIS_URL", "localhost:6379"),
        ("SANDBOX_QUEUE_CONNECT_TIMEOUT", "soon"),
        ("SANDBOX_QUEUE_CONNECT_TIMEOUT", "0"),
        ("SANDBOX_QUEUE_CONNECT_TIMEOUT", "-1"),
        ("SANDBOX_QUEUE_CONNECT_TIMEOUT", "nan"),
        ("SANDBOX_QUEUE_CONNECT_TIMEOUT", "inf"),
        ("SANDBOX_QUEUE_OUTAGE_PATIENCE", "nan"),
        ("SANDBOX_QUEUE_RESULT_TTL", "0"),
        ("SANDBOX_QUEUE_RESULT_TTL", "1e9"),
        ("SANDBOX_TYPE", "podman"),
        ("SANDBOX_QUEUE_SANDBOX_TYPE", "podman"),
    ],
)
def test_a_value_without_meaning_is_refused_by_the_name_of_the_variable_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    refused(variable)


def test_an_unknown_type_of_sandbox_is_refused_with_the_ones_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TYPE", "podman")
    with pytest.raises(InvalidSettings) as caught:
        load()
    assert all(name in str(caught.value) for name in ("kubernetes", "docker", "inprocess"))


def test_an_argument_that_is_no_setting_is_refused() -> None:
    refused("SANDBOX_QUEUE_REDIS_ULR", redis_ulr="redis://host")


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{PASSWORD}@host",
        f"redis:/:{PASSWORD}@host",
        f":{PASSWORD}@host:6379",
        PASSWORD,
    ],
)
def test_a_refused_url_is_not_printed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SANDBOX_QUEUE_REDIS_URL", url)
    error = refused("SANDBOX_QUEUE_REDIS_URL")
    assert PASSWORD not in str(error)
    assert PASSWORD not in repr(error)
    assert PASSWORD not in str(pickle.loads(pickle.dumps(error)))  # noqa: S301  # of our own making


def test_pydantics_own_error_does_not_print_the_url_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not everybody calls `load()`; and a reporter of errors may print what stands behind one."""
    monkeypatch.setenv("REDIS_URL", f"http://:{PASSWORD}@host")
    with pytest.raises(ValidationError) as caught:
        Settings()
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}/x@host:6379/0",
        f"redis://:{PASSWORD}#x@host",
        f"redis://:{PASSWORD}?x@host",
        f"redis://:x/{PASSWORD}@host:6379",
        f"redis://:1/{PASSWORD}@host:6379",
        f"redis://:p@ss:{PASSWORD}/x@host",
        f"redis://user:{PASSWORD}@host:port/0",
        f"redis://user:{PASSWORD}@host:99999/0",
        f"redis://user:{PASSWORD}@host/zero",
        f"redis://user:{PASSWORD}@[host/0",
        f"unix://:{PASSWORD}@",
    ],
)
def test_a_url_with_an_unescaped_password_is_refused_without_printing_it(url: str) -> None:
    """A '/' or '#' in a password ends the host part too early, so that the password looks like a port or a database."""
    with pytest.raises(InvalidSettings) as caught:
        Address(url)
    assert caught.value.field == "REDIS_URL"
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{PASSWORD}@host:1/2", "redis://host:1/2"),
        (f"rediss://user:{PASSWORD}@host", "rediss://user@host:6379/0"),
        (f"unix://user:{PASSWORD}@/run/s?db=3", "unix://user@/run/s"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    address = Address(url)
    assert address.password == PASSWORD
    assert str(address) == shown
    assert PASSWORD not in repr(address)


def test_repr_hides_the_url() -> None:
    settings = load(redis_url=f"redis://:{PASSWORD}@host")
    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert PASSWORD not in text
