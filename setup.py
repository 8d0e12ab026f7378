"""Packages that megascale needs, and its extras; pyproject.toml has the rest. torch is a range, so that GPU users bring
their own build; constraints.txt pins a CPU wheel.
"""

from setuptools import setup

EXTRAS = {
    "dashboard": ["dash>=2.18", "plotly>=5.24"],
    "otel": ["opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"],
    "plot": ["matplotlib>=3.9"],
    "gpu": ["transformer-engine[pytorch]>=2.1,<2.21", "liger-kernel>=0.8.4,<0.9", "nvidia-ml-py>=12"],
}

DEV = [
    "cryptography>=42",  # certificates of TLS
    "flask-cors>=4",  # of moto's server
    "grafana-foundation-sdk>=1769699998!10",  # Grafana dashboards as code
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "megatron-core>=0.16.1,<0.17",  # an oracle
    "moto[s3]>=5.0",
    "mypy>=1.13",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "ruff>=0.8",
    "s3fs>=2024.6",
    "selenium>=4.25",  # drives Chromium in the dashboard's tests
    "setuptools>=77",  # builds the wheel in a test
    "transformers>=4.48",
]

setup(
    install_requires=[
        "duckdb>=1.1",
        "fsspec>=2024.6",
        "grpcio>=1.60",
        "numpy>=1.26",
        "packaging",
        "prometheus-client>=0.20",
        "psutil>=5.9",
        "py-spy>=0.4",
        "pyarrow>=17",
        "pydantic>=2.9",
        "pyyaml>=6",
        "rich>=13.7",
        "safetensors>=0.4.5",
        "setuptools",  # tensorboard imports it
        "tensorboard>=2.16",
        "tokenizers>=0.20",
        "torch>=2.7",
    ],
    extras_require={**EXTRAS, "dev": [*EXTRAS["dashboard"], *EXTRAS["otel"], *EXTRAS["plot"], *DEV]},
)
