"""Who is let in, and who is not."""

import pytest

from luffy.errors import UserError
from luffy.view.server import AccessGate, Refused, check_address, is_loopback

TOKEN = "a-token-of-some-length"


def status(gate, token=None, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        gate.check(given, token)
    except Refused as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize("host", ["127.0.0.1:8181", "localhost:8181", "[::1]:8181"])
def test_names_of_this_machine_are_known(host):
    assert status(AccessGate("127.0.0.1", 8181), Host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8181", "127.0.0.1:80", "127.0.0.1", "", "localhost.evil.example:8181", "192.168.1.5:8181", "[::1]"],
)
def test_a_foreign_name_is_turned_away(host):
    """DNS rebinding: a site points its own name at this address."""
    assert status(AccessGate("127.0.0.1", 8181), Host=host) == 421


def test_on_all_addresses_any_address_is_known_but_no_foreign_name():
    gate = AccessGate("0.0.0.0", 8181, TOKEN)
    assert status(gate, TOKEN, Host="192.168.1.5:8181") == 200
    assert status(gate, TOKEN, Host="[fe80::1]:8181") == 200
    assert status(gate, TOKEN, Host="evil.example:8181") == 421


def test_other_sites_get_nothing_but_a_link_may_be_followed():
    gate = AccessGate("127.0.0.1", 8181)
    ask = lambda **more: status(gate, Host="localhost:8181", **more)  # noqa: E731
    assert ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors") == 403
    assert ask(Sec_Fetch_Site="same-site", Sec_Fetch_Mode="cors") == 403  # another port of this machine
    assert ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe") == 403
    assert ask(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document") == 200
    assert ask(Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors") == 200


def test_the_token_by_query_header_or_session():
    gate = AccessGate("127.0.0.1", 8181, TOKEN)
    ask = lambda token=None, **more: status(gate, token, Host="localhost:8181", **more)  # noqa: E731
    assert ask() == 401
    assert ask("a-token-of-some-lengtH") == 401
    assert ask("") == 401
    assert ask("\u00e9" * 22) == 401  # compared as bytes: other letters are no error
    assert ask(TOKEN) == 200
    assert ask(Authorization=f"Bearer {TOKEN}") == 200
    assert ask(Authorization=f"Basic {TOKEN}") == 401
    assert ask(Cookie=f"luffy_view_8181={gate.session}") == 200
    assert ask(Cookie=f"luffy_view_8181={TOKEN}") == 401  # the cookie is not the token
    assert ask(Cookie=f"luffy_view_9999={gate.session}") == 401
    other = 'theme={"dark":true}'  # of another application on the same host
    assert ask(Cookie=f"{other}; luffy_view_8181={gate.session}") == 200
    assert ask(Cookie=f"luffy_view_8181={gate.session};{other}; lone") == 200
    assert ask(Cookie=f"{other}; lone; =; luffy_view_8181=") == 401
    assert AccessGate("127.0.0.1", 8181, TOKEN).session != gate.session


def test_an_open_address_needs_a_token_of_some_length():
    check_address("127.0.0.1", None)
    check_address("::1", None)
    check_address("0.0.0.0", TOKEN)
    for host in ("0.0.0.0", "192.168.1.5", "::", "my-machine"):
        with pytest.raises(UserError, match="needs a token: export LUFFY_VIEW_TOKEN"):
            check_address(host, None)
    with pytest.raises(UserError, match="has 5 characters; use 16 or more"):
        check_address("127.0.0.1", "short")
    assert [is_loopback(h) for h in ("localhost", "127.9.9.9", "::1", "10.0.0.1")] == [True, True, True, False]
