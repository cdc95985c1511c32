"""Pages of this room."""

from __future__ import annotations

from django.urls import path, re_path

from monitoring.web import (
    fragments,
    views_alerts,
    views_compare,
    views_exports,
    views_gpu,
    views_reports,
    views_wall,
    views_waste,
    views_what_if,
)

app_name = "monitoring"
urlpatterns = [
    path("wall/", views_wall.wall_page, name="wall"),
    path("wall/sum/", views_wall.wall_sum, name="wall-sum"),
    path("wall/cells.json", views_wall.wall_cells, name="wall-cells"),
    path("wall/held.json", views_wall.wall_held, name="wall-held"),
    path("wall/card/<uuid:uid>/", views_wall.wall_card, name="wall-card"),
    path("gpus/compare/", views_compare.compare, name="gpu-compare"),
    path("gpus/compare/file/", views_compare.compare_file, name="gpu-compare-file"),
    path("gpus/<uuid:uid>/", views_gpu.gpu_page, name="gpu"),
    path("gpus/<uuid:uid>/history.json", views_gpu.gpu_history, name="gpu-history"),
    path("gpus/<uuid:uid>/history.csv", views_gpu.gpu_history_csv, name="gpu-history-csv"),
    path("live/gpus/<uuid:uid>/", fragments.gpu_live, name="gpu-live"),
    path("live/gpus/<uuid:uid>/processes/", fragments.gpu_processes, name="gpu-processes"),
    path("live/nodes/<uuid:uid>/", fragments.node_live, name="node-live"),
    path("live/allocations/<uuid:uid>/", fragments.allocation_live, name="allocation-live"),
    path("live/allocations/<uuid:uid>/mini/", fragments.allocation_mini, name="allocation-mini"),
    path("leases/<uuid:uid>/metrics/", views_gpu.allocation_metrics, name="allocation-metrics"),
    path("leases/<uuid:uid>/metrics.json", views_gpu.allocation_history, name="allocation-history"),
    path("leases/<uuid:uid>/metrics.csv", views_gpu.allocation_history_csv, name="allocation-history-csv"),
    path("alerts/", views_alerts.alert_rules, name="alert-rules"),
    path("alerts/new/", views_alerts.alert_rule, name="alert-rule-new"),
    path("alerts/<uuid:uid>/", views_alerts.alert_rule, name="alert-rule"),
    path("waste/", views_waste.waste_page, name="waste"),
    path("waste/file/", views_waste.waste_file, name="waste-file"),
    path("waste/<uuid:uid>/", views_waste.finding_page, name="finding"),
    path("waste/<uuid:uid>/<slug:act>/", views_waste.finding_act_view, name="finding-act"),
    path("metrics", views_gpu.prometheus, name="prometheus"),
    path("reports/", views_reports.reports, name="reports"),
    path("reports/files/", views_exports.exports, name="exports"),
    path("reports/files/<uuid:uid>/", views_exports.export_file, name="export-file"),
    path("reports/runs/<uuid:uid>/", views_reports.report_run_page, name="report-run"),
    path("reports/runs/<uuid:uid>/file/", views_reports.report_run_file, name="report-run-file"),
    path("reports/saved/<uuid:uid>/forget/", views_reports.report_forget_view, name="report-forget"),
    path("reports/coverage/", views_reports.report_coverage, name="report-coverage"),
    path("reports/what-if/", views_what_if.what_ifs, name="what-ifs"),
    path("reports/what-if/<uuid:uid>/", views_what_if.what_if, name="what-if"),
    re_path(
        r"^reports/what-if/(?P<uid>[0-9a-f-]{36})/(?P<act>share|unshare|forget)/$",
        views_what_if.what_if_act,
        name="what-if-act",
    ),
    path("reports/waste/card/", views_reports.report_waste_card, name="report-waste-card"),
    path("reports/<slug:code>/", views_reports.report, name="report"),
    path("reports/<slug:code>/file/", views_reports.report_file, name="report-file"),
    path("reports/<slug:code>/keep/", views_reports.report_keep, name="report-keep"),
    path("reports/<slug:code>/save/", views_reports.report_save_view, name="report-save"),
]
