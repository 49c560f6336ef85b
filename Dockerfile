# The binary is static: the image holds it and nothing else.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
ENV RUSTFLAGS="-C target-feature=+crt-static"
RUN cargo build --locked --release --bin lockstep --target x86_64-unknown-linux-gnu

FROM scratch
LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="Keeps read-only companions of ConfigMaps and Secrets in step with their sources" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /src/target/x86_64-unknown-linux-gnu/release/lockstep /lockstep
USER 65532:65532
ENTRYPOINT ["/lockstep"]
CMD ["run"]
