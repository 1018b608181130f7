"""Who may call: keys, sessions, hosts and origins."""

from __future__ import annotations

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from kvpool.gateway.access import COOKIE, SESSION_SECONDS, Access, AccessKeys, session_cookie, session_of
from tests.gateway.serving import calling

KEY = "a-key-of-this-test"
OTHER = "another-key-of-it"


async def test_without_a_key_only_health_version_and_the_form_answer() -> None:
    """A page is asked for the key, and its files and data are refused before. The form comes with an origin: under no-referrer a
    browser sends null, and over http there is nothing else that it sends."""
    async with calling(api_key=[KEY]) as client:
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/health")).status_code == 503, "there is no manager"
        assert "API key" in (await client.get("/login")).text
        for path in ("/login", "/static/login.css"):
            form = await client.get(path)
            assert (form.status_code, form.headers["referrer-policy"]) == (200, "same-origin")
        for path in ("/load", "/metrics", "/server_info", "/v1/models", "/nothing", "/static/main.js", "/api/watch"):
            refused = await client.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "Bearer" in refused.headers["www-authenticate"]
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 401


@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_each_key_opens_the_gateway_and_no_other_word_does(key: str) -> None:
    async with calling(api_key=[KEY, OTHER]) as client:
        assert (await client.get("/load", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        for wrong in (f"Bearer {key}x", f"Bearer {key[:-1]}", f"Basic {key}", key, "Bearer", "Bearer é"):
            headers = {b"authorization": wrong.encode("latin-1")}
            assert (await client.get("/load", headers=headers)).status_code == 401


async def test_the_page_logs_in_once_and_then_needs_no_key(capfd: pytest.CaptureFixture[str]) -> None:
    """The cookie is kept from scripts and other sites, is not the key, and opens the gateway until it is taken away. A redirect is
    logged by its number."""
    async with calling(api_key=[KEY]) as client:
        opened = await client.get("/")
        assert (opened.status_code, opened.headers["location"]) == (303, "/login")
        wrong = await client.post("/login", data={"key": "x" * 20})
        assert (wrong.status_code, COOKIE in wrong.cookies) == (401, False)
        right = await client.post("/login", data={"key": KEY})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert KEY not in cookie
        for path in ("/", "/load", "/static/main.js"):
            assert (await client.get(path)).status_code == 200
        foreign = await client.post("/tokenize", content=b"{}", headers={"Origin": "http://evil.example"})
        assert foreign.status_code == 403
        own = await client.post("/tokenize", content=b"{}", headers={"Origin": str(client.base_url).rstrip("/")})
        assert own.status_code == 400, "it reached the route"
        await client.post("/logout")
        client.cookies.clear()
        assert (await client.get("/load")).status_code == 401
    assert "status=303" in "".join(capfd.readouterr())


def test_a_session_is_of_its_key_and_ends() -> None:
    now = 1_000_000.0
    keys = AccessKeys([KEY], clock=lambda: now)
    digest = keys.find(KEY)
    assert digest is not None
    session = keys.issue(digest)
    assert keys.accepts(session)
    assert AccessKeys([OTHER, KEY], clock=lambda: now).accepts(session), "any gateway with the key accepts it"
    assert not AccessKeys([OTHER], clock=lambda: now).accepts(session)
    end, _, proof = session.partition(".")
    assert not keys.accepts(f"{int(end) + 1}.{proof}"), "its end cannot be changed"
    for broken in ("", ".", "x.y", f"{end}.", f"{end}.é", f"{'9' * 40}.{proof}", "²." + proof):
        assert not keys.accepts(broken)
    assert not AccessKeys([KEY], clock=lambda: now + SESSION_SECONDS).accepts(session)
    assert KEY not in repr(keys)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("pool.example:80", 200),
        ("POOL.example.", 200),
        ("evil.example", 421),
        ("pool.example.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
async def test_a_name_that_is_not_ours_is_refused(host: str, status: int) -> None:
    """A page that has made its own name point here (DNS rebinding) reaches nothing."""
    async with calling(allowed_host=["pool.example"]) as client:
        assert (await client.get("/version", headers={"Host": host})).status_code == status


async def test_pages_of_other_origins_write_only_if_allowed() -> None:
    async with calling(cors_origin=["https://chat.example"]) as client:
        allowed = await client.post("/tokenize", content=b"{", headers={"Origin": "https://chat.example"})
        assert allowed.status_code == 400, "it reached the route"
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = await client.post("/tokenize", content=b"{", headers={"Origin": "https://other.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("origin", "site", "is_own"),
    [
        (None, None, True),
        (None, "none", True),
        (None, "same-origin", True),
        (None, "same-site", False),
        (None, "cross-site", False),
        ("http://127.0.0.1:PORT", None, True),
        ("https://127.0.0.1:PORT", None, True),
        ("http://127.0.0.1:PORT", "cross-site", False),
        ("http://127.0.0.1:1", None, False),
        ("http://127.0.0.1:PORT.evil.example", None, False),
        ("https://proxy.example", None, False),
        ("https://proxy.example", "same-origin", True),
        ("null", None, False),
        ("null", "same-origin", True),
        ("null", "same-site", False),
        ("null", "cross-site", False),
        ("", None, False),
    ],
)
async def test_a_browsers_own_word_decides_over_a_write_and_else_its_origin(
    origin: str | None, site: str | None, is_own: bool
) -> None:
    """Sec-Fetch-Site holds for a page that hides its origin, and before a proxy that changes Host; a page cannot set it."""
    async with calling() as client:
        headers = {} if origin is None else {"Origin": origin.replace("PORT", str(client.base_url.port))}
        headers |= {} if site is None else {"Sec-Fetch-Site": site}
        answer = await client.post("/tokenize", content=b"{", headers=headers)
        assert answer.status_code == (400 if is_own else 403), "400: it reached the route"


@pytest.mark.parametrize("has_key", [True, False])
async def test_only_a_gateway_with_a_key_shows_who_looks_how_to_log_out(has_key: bool) -> None:
    async with calling(api_key=[KEY] if has_key else []) as client:
        page = (await client.get("/", headers={"Authorization": f"Bearer {KEY}"})).text
        assert ('action="/logout"' in page, 'id="log-out" hidden' in page) == (True, not has_key)


async def test_a_link_of_another_site_lets_the_page_ask_with_its_session_once() -> None:
    """Such a link comes without the cookie. If our own page asks without one, there is no session."""
    async with calling(api_key=[KEY]) as client:
        linked = await client.get("/", headers={"Sec-Fetch-Site": "cross-site"})
        assert (linked.status_code, 'content="0; url=/"' in linked.text) == (200, True)
        for site in ("same-origin", "none"):
            assert (await client.get("/", headers={"Sec-Fetch-Site": site})).headers["location"] == "/login"


@pytest.mark.parametrize(
    ("sent", "session"),
    [
        ("kvpool_session=right", "right"),
        ("theme=dark; kvpool_session = right ; lang=en", "right"),
        ("kvpool_session_of_another=wrong; kvpool_session=right", "right"),
        ("another_kvpool_session=wrong", ""),
        ('theirs={"a":"b c"}; kvpool_session=right', "right"),
        ("no cookie at all;;=; kvpool_session=right; other=x", "right"),
        ("", ""),
    ],
)
def test_the_session_is_found_among_the_cookies_of_other_servers(sent: str, session: str) -> None:
    """Cookies do not keep to one port: those of every server of this machine come along."""
    assert session_of(Headers({"cookie": sent})) == session


def test_a_browser_forgets_its_session_when_it_logs_out() -> None:
    assert f"Max-Age={SESSION_SECONDS};" in session_cookie("a session")
    assert f"{COOKIE}=; " in session_cookie("")
    assert "Max-Age=0;" in session_cookie("")


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY} "])
async def test_the_key_is_taken_as_http_lets_it_be_written(header: str) -> None:
    """The scheme has no case, and spaces around the key are no part of it."""
    app = Access(PlainTextResponse("inside"), keys=AccessKeys([KEY]), allowed_hosts=[])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/load", headers={"Authorization": header})).text == "inside"
