"""Pages of pool."""

from __future__ import annotations

from django.urls import path

from pool.web import (
    agent_views,
    decision_urls,
    reclaim_urls,
    views_clusters,
    views_datasets,
    views_leases,
    views_nodes,
    views_what_if,
)

app_name = "pool"
urlpatterns = [
    path("nodes/", views_nodes.node_list, name="nodes"),
    path("nodes/import/", views_nodes.import_fleet, name="import-fleet"),
    path("nodes/enrol/", views_nodes.enrol, name="enrol"),
    path("datasets/", views_datasets.dataset_list, name="datasets"),
    path("datasets/new/", views_datasets.dataset_edit, name="dataset-new"),
    path("datasets/import/", views_datasets.dataset_import_page, name="dataset-import"),
    path("datasets/<uuid:uid>/", views_datasets.dataset_edit, name="dataset"),
    path("datasets/<uuid:uid>/retire/", views_datasets.dataset_act, name="dataset-retire"),
    path("clusters/", views_clusters.cluster_list, name="clusters"),
    path("clusters/new/", views_clusters.cluster_edit, name="cluster-new"),
    path("clusters/<uuid:uid>/", views_clusters.cluster_detail, name="cluster"),
    path("clusters/<uuid:uid>/edit/", views_clusters.cluster_edit, name="cluster-edit"),
    path("clusters/<uuid:uid>/adopt/", views_clusters.cluster_adopt, name="cluster-adopt"),
    path("clusters/<uuid:uid>/do/<slug:act>/", views_clusters.cluster_act, name="cluster-act"),
    path("nodes/<uuid:uid>/", views_nodes.node_detail, name="node"),
    path("nodes/<uuid:uid>/<slug:act>/", views_nodes.node_act, name="node-act"),
    path("gpus/<uuid:uid>/do/<slug:act>/", views_nodes.gpu_act, name="gpu-act"),
    path("operations/", views_nodes.operations, name="operations"),
    path("leases/", views_leases.lease_list, name="leases"),
    path("leases/mine/cards/", views_leases.home_allocations, name="home-allocations"),
    path("leases/<uuid:uid>/", views_leases.allocation_detail, name="allocation"),
    path("leases/<uuid:uid>/log/", views_leases.allocation_log, name="allocation-log"),
    path("leases/<uuid:uid>/log.txt", views_leases.allocation_log_download, name="allocation-log-download"),
    path("leases/<uuid:uid>/do/<slug:act>/", views_leases.allocation_act, name="allocation-act"),
    path("pool/progress/<uuid:uid>/", views_leases.request_progress, name="request-progress"),
    path("pool/queue/brief/", views_leases.queue_brief, name="queue-brief"),
    path("pool/fit/", views_leases.fit, name="fit"),
    path("pool/what-if/", views_what_if.what_if_panel, name="what-if"),
]
urlpatterns += agent_views.urlpatterns
urlpatterns += reclaim_urls.urlpatterns
urlpatterns += decision_urls.urlpatterns
