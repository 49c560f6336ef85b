# The binary is static: the image holds it and nothing else.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# For `lockstep --version`: the build has no git directory.
ARG LOCKSTEP_COMMIT
ARG LOCKSTEP_COMMIT_DATE
ENV RUSTFLAGS="-C target-feature=+crt-static"
# A target is named so that the flags are for the binary alone, not for what is run while building it.
RUN host=$(rustc -vV | sed -n 's/^host: //p') \
 && cargo build --locked --release --bin lockstep --target "$host" \
 && cp "target/$host/release/lockstep" /lockstep

FROM scratch
LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="Keeps read-only companions of ConfigMaps and Secrets in step with their sources" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /lockstep /lockstep
USER 65532:65532
ENTRYPOINT ["/lockstep"]
CMD ["run"]
