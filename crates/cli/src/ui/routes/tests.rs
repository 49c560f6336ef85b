use axum::body::{Body, to_bytes};
use tower::ServiceExt;

use super::*;

const HOST: (&str, &str) = ("host", "127.0.0.1:8090");

/// A page with one route, and its token.
fn page() -> (Router, String) {
    let (access, token) = PageAccess::new(8090).unwrap();
    (protected(Router::new().route("/{token}/", get(|| file("text/html", PAGE))), access), token)
}

async fn ask(router: &Router, method: &str, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = http::Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
}

async fn status(router: &Router, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
    ask(router, method, path, headers).await.status().as_u16()
}

#[tokio::test]
async fn address_with_the_token_is_answered() {
    let (router, token) = page();
    let path = format!("/{token}/");
    assert_eq!(status(&router, "GET", &path, &[HOST]).await, 200);
    assert_eq!(status(&router, "HEAD", &path, &[HOST]).await, 200);
    assert_eq!(status(&router, "GET", &path, &[("host", "LocalHost:8090")]).await, 200);
    let own = [HOST, ("origin", "http://127.0.0.1:8090"), ("sec-fetch-site", "same-origin")];
    assert_eq!(status(&router, "GET", &path, &own).await, 200);
    assert_eq!(status(&router, "GET", &path, &[HOST, ("sec-fetch-site", "none")]).await, 200);
}

#[tokio::test]
async fn wrong_token_is_refused_for_every_path_alike() {
    let (router, token) = page();
    let (short, long) = (&token[..31], format!("{token}0"));
    let upper = token.to_uppercase().replace(|c: char| c.is_ascii_digit(), "A");
    for path in
        ["/", "//", "/favicon.ico", &format!("/{short}/"), &format!("/{long}/"), &format!("/{upper}/")]
    {
        assert_eq!(status(&router, "GET", path, &[HOST]).await, 403, "{path}");
    }
    assert_eq!(status(&router, "GET", &format!("/x/{token}/"), &[HOST]).await, 403);
    assert_eq!(status(&router, "GET", &format!("/?token={token}"), &[HOST]).await, 403);
    assert_eq!(status(&router, "GET", &format!("/{token}/nothing"), &[HOST]).await, 404);
}

#[tokio::test]
async fn tokens_have_128_random_bits() {
    let tokens: std::collections::BTreeSet<String> = (0..100).map(|_| page().1).collect();
    assert_eq!(tokens.len(), 100);
    assert!(tokens.iter().all(|token| token.len() == 32 && token.chars().all(|c| c.is_ascii_hexdigit())));
}

#[tokio::test]
async fn name_that_somebody_else_resolves_to_loopback_is_refused() {
    let (router, token) = page();
    let path = format!("/{token}/");
    for host in ["evil.example:8090", "127.0.0.1", "127.0.0.1:8091", "127.0.0.1.evil.example:8090", ""] {
        assert_eq!(status(&router, "GET", &path, &[("host", host)]).await, 403, "{host}");
    }
    assert_eq!(status(&router, "GET", &path, &[]).await, 403, "none");
    assert_eq!(status(&router, "GET", &path, &[HOST, ("host", "evil.example:8090")]).await, 403, "two");
}

#[tokio::test]
async fn request_of_another_page_is_refused() {
    let (router, token) = page();
    let path = format!("/{token}/");
    for origin in ["http://evil.example", "null", "https://127.0.0.1:8090", "http://127.0.0.1:9999"] {
        assert_eq!(status(&router, "GET", &path, &[HOST, ("origin", origin)]).await, 403, "{origin}");
    }
    // Another port of 127.0.0.1, of another user perhaps, is the same site.
    for site in ["cross-site", "same-site"] {
        assert_eq!(status(&router, "GET", &path, &[HOST, ("sec-fetch-site", site)]).await, 403, "{site}");
    }
}

#[tokio::test]
async fn other_methods_than_get_are_refused() {
    let (router, token) = page();
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"] {
        let answer = ask(&router, method, &format!("/{token}/"), &[HOST]).await;
        assert_eq!(answer.status(), 405, "{method}");
        assert_eq!(answer.headers()["allow"], "GET, HEAD");
        // Whether or not there is a route, and before anything else is looked at.
        assert_eq!(status(&router, method, "/wrong/", &[]).await, 405, "{method}");
    }
}

#[tokio::test]
async fn every_answer_forbids_frames_caches_and_foreign_content() {
    let (router, token) = page();
    for path in [format!("/{token}/"), "/wrong/".to_owned(), format!("/{token}/nothing")] {
        let answer = ask(&router, "GET", &path, &[HOST]).await;
        let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
        let policy = header("content-security-policy");
        for part in ["default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(header("cache-control"), "no-store");
        assert_eq!(header("x-content-type-options"), "nosniff");
        assert_eq!(header("referrer-policy"), "no-referrer");
    }
    let refused = ask(&router, "GET", "/wrong/", &[HOST]).await.into_body();
    let text = to_bytes(refused, 1 << 20).await.unwrap();
    assert!(!String::from_utf8_lossy(&text).contains(&token));
}

#[test]
fn page_loads_nothing_from_elsewhere_and_makes_no_html_of_texts() {
    for file in [PAGE, STYLE, SCRIPT, ICON] {
        let elsewhere = file.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !elsewhere.contains("//cdn") && !elsewhere.contains("https:") && !elsewhere.contains("http:")
        );
    }
    for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
        assert!(!SCRIPT.contains(sink), "{sink}");
    }
    for inline in ["<style", "style=", "onclick=", "onload=", "javascript:"] {
        assert!(!PAGE.contains(inline), "{inline}");
    }
}
