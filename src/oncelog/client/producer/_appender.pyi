from oncelog.client.producer.appender import Appender as Appender
from oncelog.client.producer.appender import OpenBatches as OpenBatches
from oncelog.client.producer.appender import RecordBuffer as RecordBuffer
from oncelog.client.producer.appender import call_back as call_back
from oncelog.client.producer.appender import first_unusual as first_unusual
