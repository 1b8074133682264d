"""Objects of KEDA, LeaderWorkerSet and the Prometheus Operator, as far as the chart uses them.

Kubernetes' own schemas do not know them. These are written by the projects' documentation (KEDA
2.18; leaderworkerset.x-k8s.io/v1; monitoring.coreos.com/v1 and v1alpha1) and know no field that the
chart does not use.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
ANYTHING: dict[str, Any] = {"type": "object"}


def exactly(*optional: str, **required: Any) -> dict[str, Any]:
    """An object of these fields and no others; those that are named first may be missing."""
    return {
        "type": "object",
        "properties": required,
        "additionalProperties": False,
        "required": [name for name in required if name not in optional],
    }


SECRET_KEY = exactly(name=TEXT, key=TEXT)
POLICIES = {
    "type": "array",
    "items": exactly(type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT),
}
METRICS_API = exactly(
    "authMode",
    "unsafeSsl",
    url={"type": "string", "pattern": "^https?://"},
    format={"const": "prometheus"},
    valueLocation=TEXT,
    targetValue={"type": "string", "pattern": "^[0-9.]+$"},
    authMode={"const": "bearer"},
    unsafeSsl={"const": "true"},
)
TRIGGER = {
    "oneOf": [
        exactly(
            "authenticationRef",
            type={"const": "metrics-api"},
            name=TEXT,
            metricType={"const": "Value"},
            metadata=METRICS_API,
            authenticationRef=exactly(name=TEXT),
        ),
        exactly(
            type={"const": "prometheus"},
            name=TEXT,
            metricType={"const": "Value"},
            metadata=exactly(serverAddress=TEXT, query=TEXT, threshold=TEXT),
        ),
        exactly(
            type={"const": "cpu"},
            metricType={"const": "Utilization"},
            metadata=exactly(value={"type": "string", "pattern": "^[0-9]+$"}),
        ),
    ]
}
SCALED_OBJECT = exactly(
    scaleTargetRef=exactly(apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    advanced=exactly(
        horizontalPodAutoscalerConfig=exactly(
            behavior=exactly(
                scaleUp=exactly(policies=POLICIES),
                scaleDown=exactly(stabilizationWindowSeconds=COUNT, policies=POLICIES),
            )
        )
    ),
    triggers={"type": "array", "minItems": 1, "items": TRIGGER},
)
POD_TEMPLATE = exactly(metadata=exactly(labels=TEXTS, annotations=TEXTS), spec=ANYTHING)
LEADER_WORKER_SET = exactly(
    "replicas",
    replicas=COUNT,
    rolloutStrategy=exactly(
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=exactly(maxUnavailable=COUNT, maxSurge=COUNT),
    ),
    leaderWorkerTemplate=exactly(
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
        leaderTemplate=POD_TEMPLATE,
        workerTemplate=POD_TEMPLATE,
    ),
)
AUTHORIZATION = exactly(credentials=SECRET_KEY)
TLS = exactly(insecureSkipVerify={"const": True})
DURATION = {"type": "string", "pattern": "^[0-9]+s$"}
SERVICE_MONITOR = exactly(
    selector=exactly(matchLabels=TEXTS),
    endpoints={
        "type": "array",
        "items": exactly(
            "authorization",
            "tlsConfig",
            port=TEXT,
            path=TEXT,
            scheme={"enum": ["http", "https"]},
            interval=DURATION,
            authorization=AUTHORIZATION,
            tlsConfig=TLS,
        ),
    },
)
SCRAPE_CONFIG = exactly(
    "authorization",
    "tlsConfig",
    staticConfigs={
        "type": "array",
        "items": exactly(targets={"type": "array", "items": TEXT}, labels=TEXTS),
    },
    metricsPath=TEXT,
    scheme={"enum": ["HTTP", "HTTPS"]},
    scrapeInterval=DURATION,
    authorization=AUTHORIZATION,
    tlsConfig=TLS,
)
TRIGGER_AUTHENTICATION = exactly(
    secretTargetRef={"type": "array", "items": exactly(parameter=TEXT, name=TEXT, key=TEXT)}
)
SPECS = {
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("keda.sh/v1alpha1", "TriggerAuthentication"): TRIGGER_AUTHENTICATION,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): SCRAPE_CONFIG,
}
"""The schema of ``spec`` by version and kind."""
