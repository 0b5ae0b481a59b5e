//! A link that can be broken: connections to the proxy's port go on to a target until somebody cuts them or lets them
//! swallow everything.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone)]
pub struct Proxy {
    pub port: u16,
    swallow: Arc<AtomicBool>,
    /// Bytes that came in and never went on.
    pub swallowed: Arc<AtomicUsize>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub fn new(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Self { port, swallow: Arc::default(), swallowed: Arc::default(), streams: Arc::default() };
        let own = proxy.clone();
        // Ends with the test program.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                let pairs = [(&near, &far), (&far, &near)];
                for (source, sink) in pairs {
                    let (own, source, sink) = (own.clone(), source.try_clone().unwrap(), sink.try_clone().unwrap());
                    std::thread::spawn(move || own.pump(source, sink));
                }
                own.streams.lock().unwrap().extend([near, far]);
            }
        });
        proxy
    }

    fn pump(&self, mut source: TcpStream, mut sink: TcpStream) {
        let mut bytes = [0; 4096];
        source.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        loop {
            match source.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) if self.swallow.load(Ordering::SeqCst) => {
                    self.swallowed.fetch_add(count, Ordering::SeqCst);
                }
                Ok(count) => {
                    if sink.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => break,
            }
        }
        // A link that swallows hides the end of its ends, too.
        if !self.swallow.load(Ordering::SeqCst) {
            let _ = sink.shutdown(Shutdown::Write);
        }
    }

    /// Breaks every connection; how many there were.
    pub fn cut(&self) -> usize {
        let streams = self.streams.lock().unwrap();
        streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        streams.len() / 2
    }

    pub fn swallow(&self) {
        self.swallow.store(true, Ordering::SeqCst);
    }
}
