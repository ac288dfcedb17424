"""Types of what the package offers lazily, for type checkers."""

from lmi_bench.core.errors import InputError as InputError
from lmi_bench.core.errors import LmiBenchError as LmiBenchError
from lmi_bench.core.listener import Listener as Listener
from lmi_bench.core.listener import Silent as Silent
from lmi_bench.jobs.face import predict as predict
from lmi_bench.jobs.face import recommend as recommend
from lmi_bench.jobs.face import sweep as sweep
from lmi_bench.jobs.face import write_report as write_report
from lmi_bench.jobs.predict import Prediction as Prediction
from lmi_bench.jobs.recommend import Advice as Advice
from lmi_bench.jobs.results import WrittenReport as WrittenReport
from lmi_bench.jobs.settings.plan import PredictSettings as PredictSettings
from lmi_bench.jobs.settings.recommend import RecommendSettings as RecommendSettings
from lmi_bench.jobs.settings.results import ReportSettings as ReportSettings
from lmi_bench.jobs.settings.sweep import SweepSettings as SweepSettings
from lmi_bench.jobs.sweep.result import SweepResult as SweepResult

__version__: str
