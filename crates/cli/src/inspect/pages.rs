//! Lists, page by page.

use kube::{
    Client,
    api::ListParams,
    core::{ListMeta, request},
};
use serde::{Deserialize, de::DeserializeOwned};

use lockstep_cluster::client;
use lockstep_core::failure::Failure;

/// `limit` of a list.
const PAGE_SIZE: u32 = 500;
/// How often the API server may ask for a pause before a request fails.
const MAX_PAUSES: usize = 5;

pub(crate) type Request = Result<http::Request<Vec<u8>>, request::Error>;

#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: ListMeta,
    /// An empty list of metadata is null.
    items: Option<Vec<T>>,
}

/// Reads all pages of a list. `request` makes the request for one, and `keep` says what is kept of an object.
pub(crate) async fn read_pages<T: DeserializeOwned, K>(
    client: &Client,
    params: ListParams,
    request: impl Fn(&ListParams) -> Request,
    keep: impl Fn(T) -> Option<K>,
) -> Result<Vec<K>, Failure> {
    let (mut params, mut kept) = (params.limit(PAGE_SIZE), Vec::new());
    loop {
        let page: Page<T> =
            patiently(|| client::send(client, client::REQUEST_TIMEOUT, request(&params))).await?;
        kept.extend(page.items.into_iter().flatten().filter_map(&keep));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(kept);
        }
    }
}

/// Sends a request, and again if the API server asks for a pause.
pub(crate) async fn patiently<T, F: Future<Output = Result<T, Failure>>>(
    send: impl Fn() -> F,
) -> Result<T, Failure> {
    let mut pauses = 0;
    loop {
        match send().await {
            Err(Failure::Throttled(pause)) if pauses < MAX_PAUSES => {
                pauses += 1;
                tokio::time::sleep(pause).await;
            }
            answer => return answer,
        }
    }
}
