//! PURE. Who may ask for the page: other people use the same machine, and other pages the same browser.
//!
//! The token is a part of the path and not a cookie. Browsers send a cookie of 127.0.0.1 to every port of 127.0.0.1, so
//! another user of the machine who listens on one of them would receive it.

use http::{
    HeaderMap, HeaderValue, Method, StatusCode, Uri,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, ORIGIN, REFERRER_POLICY,
        X_CONTENT_TYPE_OPTIONS,
    },
};
use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};

/// 128 bits: nobody guesses it.
const TOKEN_BYTES: usize = 16;
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Nothing but what this server sends: no inline script or style, no other origin, no frame around it. Scripts cannot
/// turn a text into HTML either (`require-trusted-types-for`).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// The headers of every answer, refusals included.
const HEADERS: [(HeaderName, &str); 6] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (CACHE_CONTROL, "no-store"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    // The token is in the URL.
    (REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Decides which requests are answered.
pub struct PageAccess {
    port: u16,
    /// The token itself is not kept: verification of its MAC takes the same time for every guess.
    key: hmac::Key,
    mac: hmac::Tag,
}

/// Why a request is not answered. The texts are for the person who sees them in a browser.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub enum Refusal {
    #[error("only GET and HEAD are answered here\n")]
    Method,
    #[error("open the page as 127.0.0.1 or localhost, with the port that `lockstep ui` has printed\n")]
    Host,
    #[error("another page has sent you here: copy the address that `lockstep ui` has printed instead\n")]
    Origin,
    #[error("the token in the address is wrong: copy the whole address that `lockstep ui` has printed\n")]
    Token,
}

impl Refusal {
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host | Self::Origin | Self::Token => StatusCode::FORBIDDEN,
        }
    }
}

impl PageAccess {
    /// Access to a page on this port, and the token that its URL needs; none if the system has no randomness.
    pub fn new(port: u16) -> Option<(Self, String)> {
        let random = SystemRandom::new();
        let mut bytes = [0; TOKEN_BYTES];
        random.fill(&mut bytes).ok()?;
        let token = format!("{:032x}", u128::from_be_bytes(bytes));
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &random).ok()?;
        let mac = hmac::sign(&key, token.as_bytes());
        Some((Self { port, key, mac }, token))
    }

    /// Whether a request may be answered.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            return Err(Refusal::Method);
        }
        // A name of somebody else's that resolves to 127.0.0.1 makes the browser take their page for ours.
        let hosts = ["127.0.0.1", "localhost"].map(|host| format!("{host}:{}", self.port));
        let host = only(headers, &HOST).ok_or(Refusal::Host)?;
        if !hosts.iter().any(|ours| ours.eq_ignore_ascii_case(host)) {
            return Err(Refusal::Host);
        }
        let foreign = |origin: &HeaderValue| {
            let origin = origin.to_str().unwrap_or_default();
            !origin.strip_prefix("http://").is_some_and(|origin| origin.eq_ignore_ascii_case(host))
        };
        // `none`: somebody has typed or pasted the address. Older browsers do not send it.
        let elsewhere = |site: &HeaderValue| site != "same-origin" && site != "none";
        if headers.get_all(ORIGIN).iter().any(foreign)
            || headers.get_all(SEC_FETCH_SITE).iter().any(elsewhere)
        {
            return Err(Refusal::Origin);
        }
        let token = uri.path().split('/').nth(1).unwrap_or_default();
        hmac::verify(&self.key, token.as_bytes(), self.mac.as_ref()).map_err(|_| Refusal::Token)
    }
}

/// The value of a header that must be there once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

/// Adds what every answer says about itself.
pub fn secure(headers: &mut HeaderMap, status: StatusCode) {
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
}
