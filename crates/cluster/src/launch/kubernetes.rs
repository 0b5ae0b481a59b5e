//! A manifest for `kubectl apply`: a Secret with the token, a headless Service through which pods find rank 0 by name, and
//! an Indexed Job whose pod index is the rank.

use serde_json::to_string as quoted;

use paceline_comm::Token;

use crate::ClusterError;
use crate::error::refused;
use crate::token;

/// What to run in a Kubernetes cluster.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    /// The name of the Job, Service and Secret.
    pub name: String,
    /// The container image, which has the program.
    pub image: String,
    /// How many pods.
    pub workers: usize,
    /// Cores of each; none for no request.
    pub cores: Option<usize>,
    /// The port that rank 0 listens on.
    pub port: u16,
    /// The program in the image and its arguments.
    pub command: Vec<String>,
}

impl Kubernetes {
    /// The manifest, with a new token.
    ///
    /// # Errors
    /// When the name cannot be one.
    pub fn manifest(&self) -> Result<String, ClusterError> {
        let name = &self.name;
        let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
        // A pod's host name is the Job's with its index behind, and must not be longer than 63.
        let good =
            name.bytes().all(sound) && ends(name.bytes().next()) && ends(name.bytes().last()) && name.len() <= 52;
        if !good || name.starts_with(|first: char| first.is_ascii_digit()) {
            return refused(format!("`{name}` is no name for a Job; type small letters, digits and dashes"));
        }
        Ok(format!("{}---\n{}", self.meeting(&Token::random()), self.job()))
    }

    /// The token, and the name under which pods find rank 0.
    fn meeting(&self, token: &Token) -> String {
        let (name, token) = (&self.name, token.to_hex());
        format!(
            r#"# kubectl apply -f this file; kubectl logs -f job/{name} --all-containers --prefix; kubectl delete -f this file
apiVersion: v1
kind: Secret
metadata:
  name: {name}
type: Opaque
stringData:
  token: "{token}"
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  # Pods find rank 0 before it is ready: it is ready when they have found it.
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
"#
        )
    }

    fn job(&self) -> String {
        let Self { name, workers, port, .. } = self;
        // A JSON string is a YAML string too, whatever is in it.
        let text = |value: &str| quoted(value).expect("text is JSON");
        let image = text(&self.image);
        let command: String = self.command.iter().map(|word| format!("            - {}\n", text(word))).collect();
        let resources = self.cores.map_or(String::new(), |cores| {
            format!("          resources:\n            requests:\n              cpu: \"{cores}\"\n")
        });
        let index = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
        let secret = token::VARIABLE;
        format!(
            r#"apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {workers}
  parallelism: {workers}
  # A run whose rank died ends as a whole and is resumed as a whole.
  backoffLimit: 0
  template:
    metadata:
      labels:
        app: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: paceline
          image: {image}
          command:
{command}          env:
            - name: RANK
              valueFrom:
                fieldRef:
                  fieldPath: "{index}"
            - name: WORLD_SIZE
              value: "{workers}"
            - name: MASTER_ADDR
              value: "{name}-0.{name}"
            - name: MASTER_PORT
              value: "{port}"
            - name: {secret}
              valueFrom:
                secretKeyRef:
                  name: {name}
                  key: token
          ports:
            - containerPort: {port}
{resources}"#
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn kubernetes() -> Kubernetes {
        Kubernetes {
            name: "run-1".into(),
            image: "registry.example/paceline:0.1".into(),
            workers: 3,
            cores: Some(4),
            port: 29_400,
            command: ["paceline", "train", "--data", "folder:/my \"photos\": {x}"].map(str::to_owned).to_vec(),
        }
    }

    #[test]
    fn the_manifest_is_yaml_that_says_what_was_meant() {
        let python = std::env::var("PACELINE_PYTHON").unwrap_or_else(|_| "python3".into());
        let found =
            Command::new(&python).args(["-c", "import yaml"]).output().is_ok_and(|output| output.status.success());
        if !found {
            // Straight to the terminal: the harness keeps what a passing test prints.
            let skipped = "skipped: the_manifest_is_yaml_that_says_what_was_meant: no Python with PyYAML\n";
            let _ = std::io::Write::write_all(&mut std::io::stderr(), skipped.as_bytes());
            return;
        }
        let script = "import sys, yaml, json; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))";
        let mut child =
            Command::new(python).args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(kubernetes().manifest().unwrap().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let parts: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(parts.as_array().unwrap().len(), 3);
        assert!(Token::from_hex(parts[0]["stringData"]["token"].as_str().unwrap()).is_some());
        assert_eq!(parts[1]["spec"]["clusterIP"], "None");
        let job = &parts[2]["spec"];
        assert_eq!((&job["completionMode"], &job["completions"]), (&"Indexed".into(), &3.into()));
        let pod = &job["template"]["spec"];
        assert_eq!(pod["subdomain"], parts[1]["metadata"]["name"]);
        let container = &pod["containers"][0];
        assert_eq!(container["command"][3], "folder:/my \"photos\": {x}");
        assert_eq!(container["env"][2]["value"], "run-1-0.run-1");
        assert_eq!(container["env"][4]["valueFrom"]["secretKeyRef"]["name"], "run-1");
        assert_eq!(container["resources"]["requests"]["cpu"], "4");
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused_here() {
        for name in ["", "-a", "a-", "A", "a b", "a\nb", "1a", &"a".repeat(60)] {
            assert!(Kubernetes { name: name.to_owned(), ..kubernetes() }.manifest().is_err(), "{name}");
        }
    }
}
