//! The page, its stream of changes, and "why not here?".

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Path, Request, State},
    middleware::{self, Next},
    response::{
        IntoResponse, Response,
        sse::{self, KeepAlive, Sse},
    },
    routing::get,
};
use futures::{StreamExt, stream};
use http::{StatusCode, header::CONTENT_TYPE};
use k8s_openapi::jiff::Timestamp;

use super::{Page, feed::Update, page_access::PageAccess};
use crate::{
    inspect::{explain, source_name::SourceName},
    ui::page_access,
};
use lockstep_core::object::names;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const ICON: &str = include_str!("icon.svg");

/// A stream without a message for this long sends one, so that a page that is gone is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The middleware has compared the token when a route is found.
pub fn routes(ui: Arc<Page>, access: PageAccess) -> Router {
    let router = Router::new()
        .route("/{token}/", get(|| file("text/html; charset=utf-8", PAGE)))
        .route("/{token}/page.css", get(|| file("text/css; charset=utf-8", STYLE)))
        .route("/{token}/page.js", get(|| file("text/javascript; charset=utf-8", SCRIPT)))
        .route("/{token}/icon.svg", get(|| file("image/svg+xml", ICON)))
        .route("/{token}/api/stream", get(stream_changes))
        .route("/{token}/api/explain/{kind}/{namespace}/{name}/{target}", get(explain_cell))
        .with_state(ui);
    protected(router, access)
}

/// Answers only what [`PageAccess`] allows, whether or not there is such a route.
fn protected(router: Router, access: PageAccess) -> Router {
    router.layer(middleware::from_fn_with_state(Arc::new(access), check))
}

async fn check(State(access): State<Arc<PageAccess>>, request: Request, next: Next) -> Response {
    let mut response = match access.check(request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => (refusal.status(), refusal.to_string()).into_response(),
    };
    let status = response.status();
    page_access::secure(response.headers_mut(), status);
    response
}

async fn file(kind: &'static str, text: &'static str) -> impl IntoResponse {
    ([(CONTENT_TYPE, kind)], text)
}

/// Everything, and then what changes.
async fn stream_changes(State(ui): State<Arc<Page>>) -> Response {
    let Some(viewer) = ui.feed.view() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open\n").into_response();
    };
    let first = stream::iter([message(&ui.feed.everything())]);
    let updates = stream::unfold((ui, viewer), async |(ui, mut viewer)| {
        let update = viewer.next(&ui.feed).await?;
        Some((message(&update), (ui, viewer)))
    });
    Sse::new(first.chain(updates)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

fn message(update: &Update) -> Result<sse::Event, Infallible> {
    Ok(sse::Event::default().event(update.name).data(&update.data))
}

/// Why a namespace has, or lacks, a companion of a source.
async fn explain_cell(
    State(ui): State<Arc<Page>>,
    Path((_, kind, namespace, name, target)): Path<(String, String, String, String, String)>,
) -> Response {
    let source = format!("{kind}/{namespace}/{name}").parse::<SourceName>();
    let (Ok(source), true) = (source, names::is_label(&target)) else {
        return (StatusCode::BAD_REQUEST, "expected a kind, a source and a namespace\n").into_response();
    };
    let source = source.key("");
    let found = {
        let snapshot = ui.snapshot.read().await;
        let unlisted = explain::unlisted(&snapshot, &source, &target);
        snapshot.read_objects(&ui.client, vec![unlisted]).await
    };
    ui.snapshot.write().await.remember(found);
    let explanation = explain::explain(&*ui.snapshot.read().await, &source, &target, Timestamp::now());
    let body = serde_json::to_string(&explanation).unwrap_or_default();
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests;
