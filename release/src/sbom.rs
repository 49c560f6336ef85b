//! The software bill of materials, in the format CycloneDX 1.6.

use serde_json::{Value, json};

use crate::crates::{Crate, ROOT};

/// The crates in the binary, with licenses, checksums and who uses whom. It has no serial number, which would have to
/// be random, and no path.
pub fn cyclone_dx(crates: &[Crate], created: &str) -> anyhow::Result<Vec<u8>> {
    let (own, others): (Vec<&Crate>, Vec<&Crate>) = crates.iter().partition(|linked| linked.name == ROOT);
    let own = own.first().map(|own| component(own, "application"));
    let others: Vec<Value> = others.into_iter().map(|other| component(other, "library")).collect();
    let edges = crates.iter().map(|linked| {
        let used: Vec<String> = linked.depends_on.iter().map(|(name, version)| purl(name, version)).collect();
        json!({ "ref": purl(&linked.name, &linked.version), "dependsOn": used })
    });
    let bom = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": { "timestamp": created, "component": own },
        "components": others,
        "dependencies": edges.collect::<Vec<_>>(),
    });
    let mut text = serde_json::to_vec_pretty(&bom)?;
    text.push(b'\n');
    Ok(text)
}

fn component(linked: &Crate, kind: &str) -> Value {
    let purl = purl(&linked.name, &linked.version);
    let mut component = json!({
        "type": kind,
        "bom-ref": purl,
        "name": linked.name,
        "version": linked.version,
        "purl": purl,
    });
    if let Some(license) = &linked.license {
        component["licenses"] = json!([{ "expression": license }]);
    }
    if let Some(checksum) = &linked.checksum {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

/// The package URL, which also identifies the component.
fn purl(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}
