//! Reserves a TCP port across restarts of its server.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

use crate::Error;

/// A port of 127.0.0.1, reserved for a server that shares it (`SO_REUSEPORT`).
///
/// If a free port is chosen and released, another process can take it before the server starts or restarts. So a socket
/// holds the port that is bound but never listens: connections reach the server, and are refused while there is none.
pub(crate) struct Port {
    _reservation: OwnedFd,
    number: u16,
}

impl Port {
    pub(crate) fn reserve() -> Result<Self, Error> {
        let reserve = || -> rustix::io::Result<_> {
            let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_reuseport(&socket, true)?;
            bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
            let address = SocketAddr::try_from(getsockname(&socket)?)?;
            Ok(Self { number: address.port(), _reservation: socket })
        };
        reserve().map_err(|error| Error::Io(error.into()))
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn reserved_port_cannot_be_bound_and_refuses_connections() {
        let port = Port::reserve().unwrap();
        let address = (Ipv4Addr::LOCALHOST, port.number());
        assert_eq!(TcpListener::bind(address).unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
