//! What `--bind` may say: an address of this machine, or the name of one of its network interfaces.
//!
//! The kernel lists each interface's own network in `/proc/net/route` and, asked for the way to an address in it, answers
//! with the interface's own address (connecting a UDP socket sends nothing). IPv4 only; an IPv6 address can be written out.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::Path;

use paceline_system::disk::Disk;

use crate::ClusterError;
use crate::error::refused;

/// The address that is meant by an address or an interface's name.
///
/// # Errors
/// When it is neither; the sentence lists the interfaces.
pub fn address(text: &str) -> Result<IpAddr, ClusterError> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if text == "lo" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let routes = Disk::real().read_text(Path::new("/proc/net/route"))?;
    let networks = networks(&routes);
    let of_interface = networks.iter().filter(|network| network.interface == text);
    if let Some(address) = of_interface.filter_map(Network::own_address).next() {
        return Ok(address);
    }
    let mut names: Vec<&str> = networks.iter().map(|network| network.interface).chain(["lo"]).collect();
    names.dedup();
    refused(format!("--bind {text} is neither an address nor an interface with one; there are: {}", names.join(", ")))
}

/// A network that an interface is in.
#[derive(Debug, PartialEq, Eq)]
struct Network<'a> {
    interface: &'a str,
    base: Ipv4Addr,
    mask: Ipv4Addr,
}

impl Network<'_> {
    /// The interface's own address, as the kernel would write it on a packet into the network.
    fn own_address(&self) -> Option<IpAddr> {
        let other = if self.mask == Ipv4Addr::BROADCAST { self.base } else { Ipv4Addr::from(u32::from(self.base) + 1) };
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect((other, 9)).ok()?;
        let own = socket.local_addr().ok()?.ip();
        // With `other` the machine's own address the answer may be another interface's; then it is not in the network.
        let inside = |own: Ipv4Addr| u32::from(own) & u32::from(self.mask) == u32::from(self.base);
        matches!(own, IpAddr::V4(own) if inside(own)).then_some(own)
    }
}

/// The directly connected networks of `/proc/net/route`, whose numbers are written as the bytes lie in memory.
fn networks(routes: &str) -> Vec<Network<'_>> {
    routes.lines().skip(1).filter_map(network).collect()
}

fn network(line: &str) -> Option<Network<'_>> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let number = |index: usize| {
        let number = u32::from_str_radix(fields.get(index)?, 16).ok()?;
        Some(Ipv4Addr::from(number.to_ne_bytes()))
    };
    let (base, gateway, mask) = (number(1)?, number(2)?, number(7)?);
    let direct = gateway.is_unspecified() && !base.is_unspecified();
    direct.then_some(Network { interface: fields[0], base, mask })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_networks_are_read_and_gateways_are_not() {
        let (base, mask) = (Ipv4Addr::new(10, 1, 2, 0), Ipv4Addr::new(255, 255, 255, 0));
        let hex = |address: Ipv4Addr| format!("{:08X}", u32::from_ne_bytes(address.octets()));
        let routes = format!(
            "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
             eth0 00000000 {} 0003 0 0 0 00000000 0 0 0\neth1 {} 00000000 0001 0 0 0 {} 0 0 0\nbroken line\n",
            hex(Ipv4Addr::new(10, 1, 2, 1)),
            hex(base),
            hex(mask)
        );
        assert_eq!(networks(&routes), [Network { interface: "eth1", base, mask }]);
    }

    #[test]
    fn this_machines_interfaces_have_their_addresses() {
        assert_eq!(address("lo").unwrap(), IpAddr::from(Ipv4Addr::LOCALHOST));
        assert_eq!(address("::1").unwrap().to_string(), "::1");
        assert!(address("no-such0").unwrap_err().to_string().contains("there are: "));
        let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
        for network in networks(&routes) {
            let found = address(network.interface).unwrap();
            assert!(std::net::TcpListener::bind((found, 0)).is_ok(), "{found} is an address of this machine");
        }
    }
}
